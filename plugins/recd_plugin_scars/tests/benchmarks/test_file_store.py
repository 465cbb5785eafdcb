"""A table larger than memory: both sides, their speeds, and the limit of memory."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from recd_plugin_scars.benchmarks import (
    file_store,
    file_store_process,
    memory_limit,
    scars,
    trainers,
)
from recd_plugin_scars.benchmarks.cells import Cells
from recd_plugin_scars.benchmarks.file_store import FileStoreFigures, FileWorkload, faster
from recd_plugin_scars.benchmarks.memory_limit import MemoryLimit, NoMemoryLimitError
from recd_plugin_scars.benchmarks.paper_tables import DeviceWorkload, OnDevice
from recd_plugin_scars.benchmarks.sizes import SIZES
from recd_plugin_scars.benchmarks.trainers import Trained
from recd_plugin_scars.runtime.mover import RowMover
from recd_plugin_scars.runtime.row_cache import CacheTraffic
from recd_plugin_scars.runtime.stores import FileStore
from recd_plugin_scars.tests.benchmarks.memory_limit_cases import allocate
from recd_plugins.errors import RecdError


def _trained(seconds: float, losses: list[float]) -> Trained:
    return Trained(losses, [seconds, 10 * seconds, seconds], 0, 0, CacheTraffic())


def test_the_file_store_is_compared_with_the_faster_mapping() -> None:
    workload = FileWorkload(1 << 20, 1 << 18, 8, 2, 3, 1, turns=2)
    probed = {"mapped": 3.0, "mapped, MADV_RANDOM": 2.0}
    assert faster(probed) == "mapped, MADV_RANDOM"  # type: ignore[arg-type]
    plain = [_trained(6.0, [1.0, 2.0]), _trained(8.0, [1.0, 2.0])]
    ours = [_trained(1.0, [1.0, 2.5]), _trained(2.0, [1.0, 2.0])]
    found = FileStoreFigures(workload, probed, plain, ours)  # type: ignore[arg-type]
    speedup, difference = found.figures()
    assert (speedup.figure, speedup.value, speedup.min) == ("file_store_speedup", 5.0, 4.0)
    assert difference.value == 0.5
    ours[1].losses[0] = math.nan
    assert math.isnan(found.loss_max_abs_diff)
    assert workload.rows * 256 == 4 * workload.memory
    assert [row[0] for row in found.details()[0].rows] == ["mapped, MADV_RANDOM", "file store"]


def test_a_table_larger_than_memory_trains_the_same(tmp_path: Path) -> None:
    """Without the limit, which not every machine can set."""

    class NoLimit(MemoryLimit):
        def set(self) -> None:
            set_by.append(self.num_bytes)

    set_by: list[int] = []
    workload = FileWorkload(1 << 20, 1 << 17, 64, 3, num_batches=4, warmup=1, turns=1)
    job = file_store._job(workload, workload.access(), tmp_path, 0)
    limit = NoLimit(tmp_path, "", 1 << 20)
    mapped = file_store_process.train_mapped(job, limit, tmp_path / "mapped", random=True)
    ours = file_store_process.train_file_store(job, limit)
    assert ours.losses == mapped.losses
    assert len(ours.seconds) == 3
    assert ours.traffic.misses > 0
    assert set_by == [1 << 20, 1 << 20]
    assert not list(tmp_path.iterdir())


def test_bursts_of_writes_count_in_speeds() -> None:
    """A step that waits for what others have left to write: the median knows nothing of it."""
    steady, bursts = (
        Trained([0.5], seconds, 0, 0, CacheTraffic())
        for seconds in ([2.0, 2.0, 2.0], [1.0, 1.0, 4.0])
    )
    workload = FileWorkload(1 << 20, 1 << 18, 8, 2, 3, 1, turns=1)
    speedup, _ = FileStoreFigures(workload, {"mapped": 1.0}, [steady], [bursts]).figures()
    assert speedup.value == 1.0
    cells = Cells(SIZES["tiny"].cells, {"plain": [steady], "both": [bursts]}, {}, 8, 3, {})
    assert cells.speeds("both") == [1.0]
    sides = {"host": steady, "cached": bursts}
    on_device = OnDevice(DeviceWorkload(8), {8: sides}).figures()
    assert [each.value for each in on_device] == [1.0, 0.0]


def test_what_is_left_to_write_is_in_the_timed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLimit(MemoryLimit):
        def set(self) -> None:
            """Not every machine can."""

    queued, written, at_the_end = [], [], []
    queue, write, counted = RowMover.write, FileStore.write, trainers.cache_traffic

    def queued_one(mover: RowMover, rows: torch.Tensor, *rest: Any, **options: Any) -> None:
        queued.append(len(rows))
        queue(mover, rows, *rest, **options)

    def slow(store: FileStore, rows: torch.Tensor, *rest: Any) -> None:
        time.sleep(0.1)
        write(store, rows, *rest)
        written.append(len(rows))

    def ended(module: torch.nn.Module) -> dict[str, CacheTraffic]:
        at_the_end.extend([sum(queued), sum(written)])
        return counted(module)

    monkeypatch.setattr(RowMover, "write", queued_one)
    monkeypatch.setattr(FileStore, "write", slow)
    monkeypatch.setattr(trainers, "cache_traffic", ended)
    workload = FileWorkload(1 << 20, 1 << 17, 64, 3, num_batches=3, warmup=0, turns=1)
    job = file_store._job(workload, workload.access(), tmp_path, 0)
    trained = file_store_process.train_file_store(job, NoLimit(tmp_path, "", 1 << 20))
    assert at_the_end[0] == at_the_end[1] > 0
    assert sum(trained.seconds) > 0.1


def test_a_limit_holds_or_is_said_to_be_missing() -> None:
    try:
        with memory_limit.memory_limit(64 << 20) as limit:
            assert limit.run(allocate, 1 << 20, limit) == 1 << 20
            with pytest.raises(RecdError, match="64 MiB was killed: they are too few"):
                limit.run(allocate, 1 << 28, limit)
    except NoMemoryLimitError as error:
        pytest.skip(str(error))
    assert not limit.folder.exists()


def test_without_a_cgroup_there_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_limit, "_V1", tmp_path / "v1")
    monkeypatch.setattr(memory_limit, "_V2", tmp_path / "v2")
    found = scars.run("small", only="file")
    assert not found.figures
    (note,) = found.notes
    assert note.startswith(
        "file_store_speedup was not measured: this machine has no memory cgroups"
    )


def test_a_cgroup_of_version_2_needs_its_memory_controller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_limit, "_V1", tmp_path / "v1")
    monkeypatch.setattr(memory_limit, "_V2", tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    with (
        pytest.raises(NoMemoryLimitError, match=r"has no memory\.max"),
        memory_limit.memory_limit(1 << 20),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.controllers"]
