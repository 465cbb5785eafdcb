from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugin_scars.runtime import stores
from recd_plugin_scars.runtime.mover import RowMover
from recd_plugin_scars.runtime.stores import open_backing_store
from recd_plugins.runtime.errors import SetupError

NUM_ROWS, DIM = 37, 3


def open_store(storage, *, num_rows=NUM_ROWS, dim=DIM, with_state=True):
    return open_backing_store(storage, name="t", num_rows=num_rows, dim=dim, with_state=with_state)


@pytest.fixture(params=["memory", "file"])
def storage(request, tmp_path):
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
    tmp_path_factory, kind, with_state, steps
):
    storage = None if kind == "memory" else tmp_path_factory.mktemp("stores")
    store = open_store(storage, with_state=with_state)
    mover = RowMover(store)
    plain = torch.zeros(NUM_ROWS, DIM + 1)
    reads = []
    for what, chosen, seed in steps:
        rows = torch.arange(NUM_ROWS) if what.endswith("all") else torch.tensor(chosen).long()
        if what.startswith("read"):
            reads.append((mover.read(rows), plain[rows]))
        else:
            generator = torch.Generator().manual_seed(seed)
            new = torch.rand(len(rows), DIM + 1, generator=generator)
            plain[rows] = new
            state = new[:, DIM].clone() if with_state else None
            mover.write(rows, new[:, :DIM].contiguous(), state)
    for pending, expected in reads:
        weights, state = pending.wait()
        assert torch.equal(weights, expected[:, :DIM])
        assert (state is not None) == with_state
        assert state is None or torch.equal(state, expected[:, DIM])
    mover.drain()
    assert torch.equal(store.weights, plain[:, :DIM])
    assert store.state is None or torch.equal(store.state, plain[:, DIM])
    mover.close()
    store.close()


def test_rows_are_read_as_often_as_they_are_asked_for(storage):
    store = open_store(storage)
    store.weights.copy_(torch.rand(NUM_ROWS, DIM))
    rows = torch.tensor([5, 6, 6, 36, 0, 5])
    weights, state = torch.empty(6, DIM), torch.empty(6)
    store.read(rows, weights, state)
    assert torch.equal(weights, store.weights[rows])
    store.close()


def test_what_is_written_to_the_tensors_is_read(storage):
    store = open_store(storage)
    store.weights[4] = 2.5
    store.state[4] = 7
    weights, state = torch.empty(1, DIM), torch.empty(1)
    store.read(torch.tensor([4]), weights, state)
    assert (weights.tolist(), state.tolist()) == ([[2.5] * DIM], [7])
    store.close()


def test_values_given_some_rows_at_a_time_are_those_given_at_once(storage, monkeypatch):
    monkeypatch.setattr(stores, "FILL_BYTES", 4 * DIM * 5)
    store = open_store(storage)
    lengths = []

    def initialise(rows):
        lengths.append(len(rows))
        rows.uniform_(-1, 1)

    torch.manual_seed(3)
    store.fill(initialise)
    torch.manual_seed(3)
    assert torch.equal(store.weights, torch.empty(NUM_ROWS, DIM).uniform_(-1, 1))
    assert lengths == [5] * 7 + [2]
    store.close()


def test_new_tables_are_zero(storage):
    store = open_store(storage)
    assert store.weights.count_nonzero() == store.state.count_nonzero() == 0
    assert store.weights.is_contiguous()
    store.close()


def test_a_rank_without_rows_has_an_empty_table(storage):
    store = open_store(storage, num_rows=0)
    mover = RowMover(store)
    weights, state = mover.read(torch.empty(0, dtype=torch.int64)).wait()
    assert (weights.shape, state.shape, store.weights.shape) == ((0, DIM), (0,), (0, DIM))
    mover.close()
    store.close()


def test_a_table_larger_than_memory_says_what_it_needs():
    with pytest.raises(
        SetupError, match=r"t: 1,000,000,000,000,000 rows .* 68,000,000,000,000,000"
    ):
        open_store(None, num_rows=10**15, dim=16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_buffers_are_pinned_for_a_cuda_device():
    store = open_store(None)
    mover = RowMover(store, pin=True)
    rows = torch.arange(4)
    weights, state = mover.buffers(4)
    assert weights.is_pinned()
    assert state.is_pinned()
    device = torch.arange(4.0 * DIM, device="cuda").view(4, DIM)
    weights.copy_(device, non_blocking=True)
    state.zero_()
    copied = torch.cuda.Event()
    copied.record()
    mover.write(rows, weights, state, ready=copied)
    read, _ = mover.read(rows).wait()
    assert read.is_pinned()
    assert torch.equal(read.cuda(), device)
    mover.close()


def test_files_are_gone_when_the_process_is_killed(tmp_path: Path):
    store = open_store(tmp_path / "new")
    store.weights.fill_(1.5)
    weights, state = torch.empty(1, DIM), torch.empty(1)
    store.read(torch.tensor([3]), weights, state)
    assert weights.tolist() == [[1.5] * DIM]
    assert list((tmp_path / "new").iterdir()) == [], "they have no names"
    store.close()
    store.close()


def test_a_disk_without_room_is_refused_with_its_folder(tmp_path: Path):
    with pytest.raises(SetupError, match=rf"^{tmp_path}: cannot hold 1,000,000,000,000 rows"):
        open_store(tmp_path, num_rows=10**12, dim=16)
