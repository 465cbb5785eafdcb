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
from tests.plugin_files import write_plugins
from tests.small_registry import write_registry

from recd_plugins import RunConfig, load_registry
from recd_plugins.data.loader import build_dataloader
from recd_plugins.data.workers import WorkerProcess
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.errors import SetupError

ROWS, ROW_GROUP, BATCH = 700, 64, 16

PLUGINS = '''
import os
import signal

class Dies(Preprocessing):
    """Kill the process at id 300."""
    name = "acme.dies"
    def transform(self, values, offsets):
        if (values == 300).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return values, offsets

class Fails(Preprocessing):
    """Raise an error at id 300."""
    name = "acme.fails"
    def transform(self, values, offsets):
        if (values == 300).any():
            raise ValueError("this id brings bad luck")
        return values, offsets
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    rows = range(ROWS)
    ids = pa.list_(pa.int64())
    table = {
        "session_id": pa.array([row // 5 for row in rows], pa.int64()),
        "ts": pa.array(rows, pa.int64()),
        "label": pa.array([row % 2 for row in rows], pa.int8()),
        "number": pa.array(rows, pa.float32()),
        "row": pa.array([[row] for row in rows], ids),
        "tags": pa.array([[row // 5, 7][: row // 5 % 3] for row in rows], ids),
    }
    pq.write_table(pa.table(table), folder / "table.parquet", row_group_size=ROW_GROUP)
    write_plugins(folder, PLUGINS, "Dies", "Fails")
    return folder


def write(folder: Path, workers: int, *steps: str) -> Path:
    options = {"path": str(folder / "table.parquet")}
    return write_registry(
        folder,
        f"{workers}.yaml",
        dataset={"use": "recd.session_parquet", "options": options},
        converter={"use": "recd.ikjt"},
        preprocessing=[{"use": step, "features": ["row"]} for step in steps],
        training={"batch_size": BATCH, "workers": workers},
    )


def registry(folder: Path, workers: int, *steps: str) -> RunConfig:
    return load_registry(write(folder, workers, *steps), plugins_dir=folder / "plugins")


def rows_of(batches: list[ModelInput]) -> list[int]:
    return [int(row) for batch in batches for row in batch.dense_features.flatten()]


def workers_there() -> list[int]:
    """Processes of the workers of this process; ranks that other tests started stay."""
    children = multiprocessing.active_children()
    return [child.pid for child in children if child.pid and isinstance(child, WorkerProcess)]


@pytest.fixture(autouse=True)
def leaves_no_worker() -> Iterator[None]:
    yield
    assert workers_there() == []


def read(loader: Any, most: int | None = None) -> list[Any]:
    return [
        (
            batch.dense_features.tolist(),
            [each.values().tolist() for each in (batch.sparse_features,) if each is not None],
            loader.state_dict(),
        )
        for batch in islice(loader, most)
    ]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_batches_and_positions_are_those_of_the_rank_alone(folder, rank, world_size):
    alone, shared = (
        build_dataloader(registry(folder, workers), rank, world_size) for workers in (0, 2)
    )
    for _epoch in range(2):
        expected = read(alone)
        assert read(shared) == expected
        assert shared.state_dict() == alone.state_dict()
    for step in (0, 3, len(expected) - 2):
        shared.load_state_dict(json.loads(json.dumps(expected[step][-1])))
        assert read(shared, 2) == expected[step + 1 : step + 3]
    shared.load_state_dict(expected[2][-1])
    assert read(shared) == expected[3:]


def failure(loader: Any) -> tuple[str, list[int]]:
    batches: list[ModelInput] = []
    with pytest.raises(ValueError, match="this id brings bad luck") as caught:
        batches.extend(loader)
    return str(caught.value), rows_of(batches)


def test_a_reader_raises_the_error_of_the_rank_alone(folder):
    alone, shared = (
        build_dataloader(registry(folder, workers, "acme.fails"), 0, 1) for workers in (0, 2)
    )
    error, rows = failure(alone)
    for expected in (rows, []):
        assert failure(shared) == (error, expected)
        assert shared.state_dict()["history"] == [[1, len(rows) // BATCH]]


@pytest.fixture
def as_if_pinned(monkeypatch) -> list[str]:
    threads: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    return threads


def test_a_thread_pins_what_workers_made(folder, as_if_pinned):
    cuda = torch.device("cuda")
    loader = build_dataloader(registry(folder, 2), 0, 1, device=cuda)
    drawn = torch.get_rng_state()
    assert rows_of(list(loader)) == list(range(ROWS // BATCH * BATCH))
    assert torch.equal(torch.get_rng_state(), drawn), "a model's dropout would draw other numbers"
    assert set(as_if_pinned) - {threading.main_thread().name}, "the trainer waited for it"


@pytest.mark.parametrize("device", [None, torch.device("cuda")])
def test_a_killed_worker_is_replaced(folder, capfd, device, as_if_pinned):
    loader = build_dataloader(registry(folder, 2), 0, 1, device=device)
    read = []
    for step, batch in enumerate(loader):
        read.append(batch)
        if step == 9:
            os.kill(workers_there()[1], signal.SIGKILL)
    assert rows_of(read) == list(range(ROWS // BATCH * BATCH))
    errors = capfd.readouterr().err
    assert errors.count("was killed by SIGKILL. New workers continue") == 1, errors
    assert "of rank 0 (process " in errors


def test_workers_that_die_again_and_again_are_an_error(folder, capfd):
    loader = build_dataloader(registry(folder, 2, "acme.dies"), 0, 1)
    read: list[ModelInput] = []
    with pytest.raises(SetupError, match=r"SIGKILL, the third failure.*training\.workers: 0"):
        read.extend(loader)
    assert rows_of(read) == list(range(256)), "the row groups before"
    assert capfd.readouterr().err.count("New workers continue") == 2
    assert loader.state_dict()["history"] == [[1, 16]]


# Without `if __name__ == "__main__"`: workers must not run it.
TRAINER = """
import json, multiprocessing, sys, time
from recd_plugins import load_registry
from recd_plugins.data.loader import build_dataloader

loader = build_dataloader(load_registry(sys.argv[1]), 0, 1)
for batch in loader:
    print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_of_a_killed_trainer(folder):
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    trainer = Program([sys.executable, script, write(folder, 2)])
    pids = json.loads(trainer.first_line())
    assert len(pids) == 2
    trainer.kill()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
