from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugin_scars.runtime import stores
from recd_plugin_scars.runtime.stores import BackingStore, RowMover, open_backing_store
from recd_plugins.runtime.errors import RecdError, SetupError

NUM_ROWS, DIM = 37, 3


def open_store(
    folder: Path | None, *, num_rows: int = NUM_ROWS, dim: int = DIM, with_state: bool = True
) -> Any:
    return open_backing_store(folder, name="t", num_rows=num_rows, dim=dim, with_state=with_state)


@pytest.fixture(params=["memory", "file"])
def folder(request: Any, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path


# What is done, which rows, and a seed for what is written.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "read all", "write all"]),
        st.lists(st.integers(0, NUM_ROWS - 1), unique=True),
        st.integers(0, 1000),
    ),
    max_size=20,
)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("kind", ["memory", "file"])
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_any_order_of_reads_and_writes_gives_what_a_tensor_gives(
    tmp_path_factory: pytest.TempPathFactory, kind: str, with_state: bool, steps: Any
) -> None:
    folder = None if kind == "memory" else tmp_path_factory.mktemp("stores")
    store = open_store(folder, with_state=with_state)
    mover = RowMover(store)
    assert store.weights.is_contiguous()
    plain = torch.zeros(NUM_ROWS, DIM + 1)
    reads = []
    for what, chosen, seed in steps:
        rows = torch.arange(NUM_ROWS) if what.endswith("all") else torch.tensor(chosen).long()
        if what.startswith("read"):
            reads.append((mover.read(rows), plain[rows]))
        else:
            new = torch.rand(len(rows), DIM + 1, generator=torch.Generator().manual_seed(seed))
            plain[rows] = new
            state = new[:, DIM].clone() if with_state else None
            mover.write(rows, new[:, :DIM].contiguous(), state)
    for pending, expected in reads:
        weights, state = pending.result()
        assert torch.equal(weights, expected[:, :DIM])
        assert (state is not None) == with_state
        assert state is None or torch.equal(state, expected[:, DIM])
    mover.drain()
    assert torch.equal(store.weights, plain[:, :DIM])
    assert store.state is None or torch.equal(store.state, plain[:, DIM])
    mover.close()
    store.close()


def test_values_given_some_rows_at_a_time_are_those_given_at_once(
    folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FILL_BYTES", 4 * DIM * 5)
    store = open_store(folder)
    torch.manual_seed(3)
    store.fill(lambda rows: rows.uniform_(-1, 1))
    torch.manual_seed(3)
    assert torch.equal(store.weights, torch.empty(NUM_ROWS, DIM).uniform_(-1, 1))
    store.close()


def test_a_rank_without_rows_has_an_empty_table(folder: Path | None) -> None:
    store = open_store(folder, num_rows=0)
    mover = RowMover(store)
    weights, state = mover.read(torch.empty(0, dtype=torch.int64)).result()
    assert (weights.shape, state.shape, store.weights.shape) == ((0, DIM), (0,), (0, DIM))
    mover.close()
    store.close()


def test_a_store_without_room_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=rf"^{tmp_path}: cannot .* 1,000,000,000,000 table rows"):
        open_store(tmp_path, num_rows=10**12, dim=16)


def test_files_have_no_names_and_go_with_the_process(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    store.close()
    store.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_buffers_are_pinned_for_a_cuda_device() -> None:
    mover = RowMover(open_store(None), pin=True)
    rows = torch.arange(4)
    weights, state = mover.buffers(4)
    assert weights.is_pinned()
    device = torch.arange(4.0 * DIM, device="cuda").view(4, DIM)
    weights.copy_(device, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    mover.write(rows, weights, state, ready=copied)
    read, _ = mover.read(rows).result()
    assert read.is_pinned()
    assert torch.equal(read.cuda(), device)
    mover.close()


class BrokenStore(BackingStore):
    def __init__(self, error: Exception) -> None:
        super().__init__(name="table t", num_rows=9, dim=DIM, with_state=True)
        self.error, self.num_calls = error, 0

    def read(self, rows: Any, weights: Any, state: Any) -> None:
        self.check(rows)
        super().read(rows, weights, state)

    def write(self, rows: Any, weights: Any, state: Any) -> None:
        self.check(rows)
        super().write(rows, weights, state)

    def check(self, rows: torch.Tensor) -> None:
        self.num_calls += 1
        if 8 in rows:
            raise self.error


def write(mover: RowMover, *rows: int) -> None:
    mover.write(torch.tensor(rows), torch.ones(len(rows), DIM), torch.ones(len(rows)))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RecdError("f: row 8 could not be read (Input/output error)"), r"^f: row 8 .* error\)$"),
        (MemoryError("too much"), "^table t: reading or writing .*too much"),
    ],
)
def test_after_an_error_nothing_moves_and_every_call_says_why(
    error: Exception, message: str
) -> None:
    store = BrokenStore(error)
    mover = RowMover(store)
    may_start = threading.Event()
    mover._thread.submit(may_start.wait, 60)  # until all is queued
    write(mover, 8)
    write(mover, 1)
    behind = mover.read(torch.tensor([2]))
    may_start.set()
    for call in (behind.result, mover.drain, lambda: mover.read(torch.tensor([1]))):
        with pytest.raises(RecdError, match=message):
            call()
    assert store.num_calls == 1
    assert store.weights.count_nonzero() == 0
    mover.close()


def test_close_does_what_is_queued() -> None:
    store = BackingStore(name="t", num_rows=9, dim=DIM, with_state=True)
    mover = RowMover(store)
    write(mover, 3)
    mover.close()
    mover.close()
    assert store.weights[3].tolist() == [1] * DIM
