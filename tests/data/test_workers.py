"""Reader workers keep the contract of ingestions, and a worker that dies is replaced."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recd_plugins import RunConfig, load_registry
from recd_plugins.data.loader import build_dataloader
from recd_plugins.data.workers import WorkerProcess, Workers
from recd_plugins.interfaces import Ingestion
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.errors import SetupError
from recd_plugins.testing.contracts import IngestionContract

ROWS, ROW_GROUP, BATCH = 700, 64, 16

PLUGINS = '''
import os
import signal
from recd_plugins.config.hookspecs import hookimpl
from recd_plugins.interfaces import Preprocessing

class Dies(Preprocessing):
    """Kill the process at id 300."""
    name = "acme.dies"
    def transform(self, values, offsets):
        if (values == 300).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return values, offsets

@hookimpl
def register_preprocessing(): return [Dies]
'''


class Shared(Ingestion):
    """Reader workers."""

    name = "test.shared"

    def open(self, task):
        return Workers(task, 2, pin_memory=False)


class TestWorkers(IngestionContract):
    test_module_imports_without_torch = None  # type: ignore[assignment]

    @pytest.fixture
    def plugin(self) -> Ingestion:
        return Shared(Shared.Options())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose rows have their number in ``number`` and ``row``."""
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
    (folder / "plugins").mkdir()
    (folder / "plugins" / "acme.py").write_text(PLUGINS)
    return folder


def write_registry(folder: Path, workers: int, *, dies: bool = False) -> Path:
    dataset = {"use": "recd.session_parquet", "options": {"path": str(folder / "table.parquet")}}
    document = {
        "version": 1,
        "dataset": dataset,
        "converter": {"use": "recd.ikjt"},
        "preprocessing": [{"use": "acme.dies", "features": ["row"]}] * dies,
        "training": {"batch_size": BATCH, "workers": workers},
    }
    path = folder / f"{workers}.yaml"
    path.write_text(json.dumps(document))
    return path


def registry(folder: Path, workers: int, **options: Any) -> RunConfig:
    path = write_registry(folder, workers, **options)
    return load_registry(path, plugins_dir=folder / "plugins")


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
    assert errors.count("was killed by SIGKILL; new workers read on") == 1, errors
    assert "of rank 0 (process " in errors


def test_workers_that_die_again_and_again_are_an_error(folder, capfd):
    loader = build_dataloader(registry(folder, 2, dies=True), 0, 1)
    read: list[ModelInput] = []
    with pytest.raises(SetupError, match=r"SIGKILL, the third death.*training\.workers: 0"):
        read.extend(loader)
    assert rows_of(read) == list(range(256)), "the row groups before"
    assert capfd.readouterr().err.count("new workers read on") == 2
    assert loader.state_dict()["history"] == [[1, 16]]
