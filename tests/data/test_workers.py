"""Reader workers: the same batches whoever reads, every row once, and deaths that cost nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.forked import Program
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import RunConfig, load_registry
from recd_plugins.data.loader import DataLoader, build_dataloader
from recd_plugins.data.workers import WorkerProcess
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.errors import DataError, RecdError, SetupError

ROWS, ROW_GROUP, BATCH = 700, 64, 16

PLUGINS = '''
import os
import signal
from recd_plugins.runtime.errors import DataError
from recd_plugins.config.hookspecs import hookimpl
from recd_plugins.interfaces import *

class Fault(Preprocessing):
    """Something happens at one id."""
    name = "acme.fault"
    class Options(PluginOptions):
        what: str
        at: int
    def transform(self, values, offsets):
        if (values == self.options.at).any():
            if self.options.what == "raise":
                raise ValueError("this id brings bad luck")
            if self.options.what == "refuse":
                raise DataError(f"clicks.log:7: id {self.options.at} is not allowed")
            os.kill(os.getpid(), signal.SIGKILL)
        return values, offsets

@hookimpl
def register_preprocessing(): return [Fault]
'''


def write_table(path: Path, broken_row: int | None = None) -> None:
    """Each row has its number in ``number`` and ``row``; ``tags`` are those of its session."""
    tags: list[Any] = [[row // 5, 7, row // 5 + 1][: row // 5 % 4] for row in range(ROWS)]
    if broken_row is not None:
        tags[broken_row] = [1, None]
    table = {
        "session_id": pa.array([row // 5 for row in range(ROWS)], pa.int64()),
        "ts": pa.array(range(ROWS), pa.int64()),
        "label": pa.array([row % 2 for row in range(ROWS)], pa.int8()),
        "number": pa.array(range(ROWS), pa.float32()),
        "row": pa.array([[row] for row in range(ROWS)], pa.list_(pa.int64())),
        "tags": pa.array(tags, pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(table), path, row_group_size=ROW_GROUP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    write_table(folder / "table.parquet")
    write_table(folder / "broken.parquet", broken_row=300)
    (folder / "plugins").mkdir()
    (folder / "plugins" / "acme.py").write_text(PLUGINS)
    return folder


def write_registry(
    folder: Path,
    workers: int,
    *,
    table: str = "table.parquet",
    shuffle: bool = False,
    batch_size: int = BATCH,
    fault: tuple[str, int] | None = None,
) -> Path:
    steps = []
    if fault is not None:
        options = {"what": fault[0], "at": fault[1]}
        steps = [{"use": "acme.fault", "features": ["row"], "options": options}]
    dataset = {"path": str(folder / table), "shuffle": shuffle}
    document = {
        "version": 1,
        "dataset": {"use": "recd.session_parquet", "options": dataset},
        "converter": {"use": "recd.ikjt"},
        "preprocessing": steps,
        "training": {"batch_size": batch_size, "workers": workers},
    }
    path = folder / f"{workers}.yaml"
    path.write_text(json.dumps(document))
    return path


def registry(folder: Path, workers: int, **options: Any) -> RunConfig:
    path = write_registry(folder, workers, **options)
    return load_registry(path, plugins_dir=folder / "plugins")


def contents(batch: ModelInput) -> list[Any]:
    """All that is in a batch, as lists."""
    kjt = batch.sparse_features
    assert isinstance(kjt, KeyedJaggedTensor)
    names, inverse = kjt.inverse_indices_or_none() or ([], torch.zeros(0))
    tensors = batch.dense_features, batch.labels, kjt.values(), kjt.lengths(), inverse
    return [kjt.keys(), kjt.stride_per_key(), names, *(tensor.tolist() for tensor in tensors)]


def rows_of(batches: list[ModelInput]) -> list[int]:
    return [int(row) for batch in batches for row in batch.dense_features.flatten()]


def with_positions(loader: DataLoader) -> list[tuple[list[Any], dict[str, Any]]]:
    return [(contents(batch), loader.state_dict()) for batch in loader]


def workers_there() -> list[int]:
    """Processes of the workers of this process; ranks that other tests started stay."""
    children = multiprocessing.active_children()
    return [child.pid for child in children if child.pid and isinstance(child, WorkerProcess)]


@pytest.fixture(autouse=True)
def leaves_no_worker() -> Iterator[None]:
    yield
    assert workers_there() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_and_positions_are_the_same(folder, workers):
    """Two epochs of row groups in random order; batches reach over row groups."""
    options = {"shuffle": True, "batch_size": 20}
    alone = build_dataloader(registry(folder, 0, **options), 1, 2)
    shared = build_dataloader(registry(folder, workers, **options), 1, 2)
    assert len(shared) == len(alone)
    drawn = torch.get_rng_state()
    for _epoch in range(2):
        assert with_positions(shared) == with_positions(alone)
        assert shared.state_dict() == alone.state_dict()
    assert torch.equal(torch.get_rng_state(), drawn), "a model's dropout would draw other numbers"


@pytest.mark.parametrize(
    ("before", "after"), [((1, 0), (2, 2)), ((2, 2), (4, 0)), ((4, 2), (1, 2))]
)
def test_every_row_is_read_once(folder, before, after):
    """Some steps on one number of ranks and workers, the rest of the epoch on others."""
    steps = 5
    ranks, workers = before
    first = registry(folder, workers)
    read, positions = [], []
    for rank in range(ranks):
        loader = build_dataloader(first, rank, ranks)
        read += rows_of(list(islice(loader, steps)))
        positions.append(json.dumps(loader.state_dict()))
    assert len(read) == ranks * steps * BATCH
    assert len(set(positions)) == 1

    ranks, workers = after
    second = registry(folder, workers)
    num_steps = set()
    for rank in range(ranks):
        loader = build_dataloader(second, rank, ranks)
        loader.load_state_dict(json.loads(positions[0]))
        rest = rows_of(list(loader))
        num_steps.add(len(rest))
        read += rest
    assert len(num_steps) == 1
    assert len(set(read)) == len(read), "a row was read twice"
    assert set(read) <= set(range(ROWS))
    left = ROWS - before[0] * steps * BATCH
    assert ROWS - len(read) == left % (ranks * BATCH), "more than the remainder was left out"


@pytest.fixture
def as_if_pinned(monkeypatch) -> list[str]:
    """The threads that pinned something."""
    threads: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return threads


def test_a_thread_pins_what_workers_made(folder, as_if_pinned):
    cuda = torch.device("cuda")
    loader = build_dataloader(registry(folder, 2), 0, 1, device=cuda)
    alone = build_dataloader(registry(folder, 0), 0, 1)
    assert with_positions(loader) == with_positions(alone)
    assert set(as_if_pinned) - {threading.main_thread().name}, "the trainer waited for it"


@pytest.mark.parametrize(("victim", "device"), [(0, None), (1, torch.device("cuda"))])
def test_a_killed_worker_is_replaced(folder, capfd, victim, device, as_if_pinned):
    loader = build_dataloader(registry(folder, 2), 0, 1, device=device)
    read = []
    for step, batch in enumerate(loader):
        read.append(batch)
        if step == 9:
            os.kill(workers_there()[victim], signal.SIGKILL)
    assert rows_of(read) == list(range(ROWS // BATCH * BATCH))
    errors = capfd.readouterr().err
    assert errors.count("was killed by SIGKILL; new workers read on") == 1, errors
    assert "of rank 0 (process " in errors


def fails(loader: DataLoader) -> tuple[Exception, list[int]]:
    """The error that ends an epoch, and the rows before it."""
    read: list[ModelInput] = []
    with pytest.raises((RecdError, ValueError)) as caught:
        read.extend(loader)
    return caught.value, rows_of(read)


def test_workers_that_die_again_and_again_are_an_error(folder, capfd):
    loader = build_dataloader(registry(folder, 2, fault=("die", 300)), 0, 1)
    error, read = fails(loader)
    assert isinstance(error, SetupError)
    assert read == list(range(256)), "the row groups before"
    assert "was killed by SIGKILL, the third death" in str(error)
    assert "training.workers: 0" in str(error)
    assert capfd.readouterr().err.count("new workers read on") == 2
    assert loader.state_dict()["history"] == [[1, 16]]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DataError, {"table": "broken.parquet"}),
        (DataError, {"fault": ("refuse", 300)}),
        (ValueError, {"fault": ("raise", 300)}),
    ],
)
def test_errors_are_those_of_reading_alone(folder, capfd, kind, options):
    """The same error at the same batch, whichever worker has it."""
    error, read = fails(build_dataloader(registry(folder, 2, **options), 0, 1))
    expected, read_alone = fails(build_dataloader(registry(folder, 0, **options), 0, 1))
    assert type(error) is type(expected) is kind
    assert str(error).replace("2.yaml", "0.yaml") == str(expected)
    assert read == read_alone == list(range(288))
    assert capfd.readouterr().err == ""


# Without `if __name__ == "__main__"`: workers must not run it.
TRAINER = """
import json, multiprocessing, signal, sys, threading, time
from recd_plugins import load_registry
from recd_plugins.runtime.imports import silence_upstream
from recd_plugins.data.loader import build_dataloader

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
silence_upstream()
loader = build_dataloader(load_registry(sys.argv[1]), 0, 1)
next(iter(loader))
left = [len(multiprocessing.active_children())]
deadline = time.monotonic() + 5
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.01)  # a queue ends its thread soon
left += [threading.active_count()]
try:
    for batch in loader:
        pids = [child.pid for child in multiprocessing.active_children()]
        print(json.dumps([left, pids]), flush=True)
        while True:  # a signal that comes as a sleep begins is heard when it ends
            time.sleep(0.1)
except KeyboardInterrupt:
    print("interrupted", loader.state_dict()["history"], flush=True)
"""


def gone(pids: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_nothing_is_left_of_a_trainer(folder):
    """One is interrupted as by Ctrl-C, one is killed; both have left an epoch early before."""
    path = write_registry(folder, 2)
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    trainers = [Program([sys.executable, script, path]) for _ in range(2)]
    lines = [trainer.first_line() for trainer in trainers]
    (left, pids), (_, pids_of_killed) = map(json.loads, lines)
    assert left == [0, 1], "workers or threads are there after an epoch that was left early"
    assert len(pids) == len(pids_of_killed) == 2

    os.killpg(trainers[0].pid, signal.SIGINT)
    trainers[1].kill()
    assert trainers[0].wait(timeout=200) == 0
    assert trainers[0].output() == (f"{lines[0]}interrupted [[1, 2]]\n", "")
    assert gone([*pids, *pids_of_killed])
    assert trainers[1].output()[1] == ""
