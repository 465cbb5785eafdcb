"""A table 4 times the memory it is given: our file store against a plain memory-mapped table."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from recd_plugin_scars.benchmarks.criteo import draw
from recd_plugin_scars.benchmarks.memory_limit import MemoryLimit, memory_limit
from recd_plugin_scars.benchmarks.model import Shape
from recd_plugin_scars.benchmarks.trainers import Job, Trained
from recd_plugins.api import RecdError
from recd_plugins.api.access import TableAccess, zipf
from recd_plugins.api.registry import TrainingSpec
from recd_plugins.testing.benchmark import Detail, Figure, largest

#: Of the table over the memory that all of a process may use.
TIMES_MEMORY = 4
SIDES_TABLE = "a table of 4 times the memory"
FileSide = Literal["mapped", "mapped, MADV_RANDOM", "file store"]
BASELINES: tuple[FileSide, ...] = ("mapped", "mapped, MADV_RANDOM")
OURS: FileSide = "file store"
# Without optimizer state, which would be a second page of each row for the baseline.
_TRAINING = TrainingSpec(optimizer="sgd", learning_rate=0.02, dense_learning_rate=0.01)
_FEATURE = "ids"
# Steps that tell the faster baseline, of fewer samples: where a mapping reads ahead more than there
# is memory for, a step takes minutes.
_PROBED, _SMALLER = 3, 32


@dataclass(frozen=True)
class FileWorkload:
    """What is trained.

    Attributes:
        memory: bytes that a process may use, interpreter and page cache included.
        cache: of them, bytes of cached rows.
        batch_size: samples.
        lookups: of a sample, of the one table.
        num_batches: of a run.
        warmup: of them, not timed.
        turns: of all sides.
        embedding_dim: scalars a row.
        exponent: of Zipf's law.
    """

    memory: int
    cache: int
    batch_size: int
    lookups: int
    num_batches: int
    warmup: int
    turns: int
    embedding_dim: int = 64
    exponent: float = 1.1

    @property
    def rows(self) -> int:
        """The rows of the table."""
        return TIMES_MEMORY * self.memory // (4 * self.embedding_dim)

    def access(self) -> TableAccess:
        """How often each row is read."""
        return zipf(f"t_{_FEATURE}", self.rows, 1.0, self.exponent, seed=0, features=(_FEATURE,))


@dataclass(frozen=True)
class FileStoreFigures:
    """What was measured.

    Attributes:
        workload: of it.
        probed: seconds of a small step of each baseline.
        plain: runs of the faster baseline, by turn.
        ours: runs of the file store, by turn.
    """

    workload: FileWorkload
    probed: Mapping[FileSide, float]
    plain: Sequence[Trained]
    ours: Sequence[Trained]

    @property
    def baseline(self) -> FileSide:
        """The faster of the plain tables."""
        return faster(self.probed)

    @property
    def loss_max_abs_diff(self) -> float:
        """The largest difference of the losses of the sides, in any step of any turn."""
        pairs = zip(self.plain, self.ours, strict=True)
        return largest(
            float(np.abs(np.array(plain.losses) - np.array(ours.losses)).max())
            for plain, ours in pairs
        )

    def figures(self) -> list[Figure]:
        """Speed, and that the same was trained."""
        pairs = zip(self.plain, self.ours, strict=True)
        return [
            Figure.of(
                "file_store_speedup",
                [plain.step_seconds / ours.step_seconds for plain, ours in pairs],
                unit="ratio",
                better="higher",
                goal=6,
            ),
            Figure.of(
                "file_store_loss_max_abs_diff",
                [self.loss_max_abs_diff],
                unit="loss",
                better="lower",
                goal=1e-6,
            ),
        ]

    def details(self) -> list[Detail]:
        """The times and rows of each side."""
        workload, traffic = self.workload, self.ours[0].traffic
        rows: list[list[str | float]] = []
        for side, runs in ((self.baseline, self.plain), (OURS, self.ours)):
            seconds = statistics.median(run.step_seconds for run in runs)
            rows.append([side, 1e3 * seconds, workload.batch_size / seconds])
        rows[0] += [traffic.lookups / workload.num_batches, ""]
        rows[1] += [traffic.unique_rows / workload.num_batches]
        rows[1] += [traffic.misses / workload.num_batches]
        return [
            Detail(SIDES_TABLE, ["", "ms", "samples/s", "rows looked up", "from the file"], rows)
        ]

    def notes(self) -> list[str]:
        """What was compared."""
        workload = self.workload
        probed = ", ".join(f"{side} {1e3 * spent:.0f} ms" for side, spent in self.probed.items())
        return [
            f"file store: {workload.rows:,} rows, "
            f"{TIMES_MEMORY * workload.memory / 2**20:.0f} MiB; a process may use "
            f"{workload.memory / 2**20:.0f} MiB in all, of which "
            f"{workload.cache / 2**20:.0f} MiB are our cached rows. A small step of the plain "
            f"tables: {probed}; the faster one is the baseline"
        ]


def measure_file_store(workload: FileWorkload, folder: Path) -> FileStoreFigures:
    """Train all sides, each in a limited process of its own, in turns.

    Args:
        workload: what is trained.
        folder: on the disk that is measured; the tables are made there.

    Raises:
        NoMemoryLimitError: no memory cgroup can be made.
        RecdError: a side failed, or the disk is too small.
    """
    _check_disk(workload, folder)
    plain, ours = [], []
    with memory_limit(workload.memory) as limit:
        access = workload.access()
        few = replace(
            workload, num_batches=_PROBED, warmup=1, batch_size=workload.batch_size // _SMALLER
        )
        probe = _job(few, access, folder, 0)
        probed = {side: _run(limit, probe, side, folder).step_seconds for side in BASELINES}
        for turn in range(workload.turns):
            job = _job(workload, access, folder, turn)
            plain.append(_run(limit, job, faster(probed), folder))
            ours.append(_run(limit, job, OURS, folder))
    return FileStoreFigures(workload, probed, plain, ours)


def faster(probed: Mapping[FileSide, float]) -> FileSide:
    """The side whose step takes least."""
    return min(probed, key=lambda side: probed[side])


def _check_disk(workload: FileWorkload, folder: Path) -> None:
    needed, free = TIMES_MEMORY * workload.memory, shutil.disk_usage(folder).free
    if needed > free:
        raise RecdError(
            f"{folder}: the table of the file store needs {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free; set TMPDIR to a folder with more"
        )


def _job(workload: FileWorkload, access: TableAccess, folder: Path, turn: int) -> Job:
    """Batches of a turn."""
    rng = np.random.default_rng((1, turn))
    size = workload.batch_size * workload.lookups
    ids = draw(access, rng, workload.num_batches, size)
    cached = workload.cache // (4 * workload.embedding_dim)
    return Job(
        shape=Shape((_FEATURE,), (workload.rows,), workload.embedding_dim, (64,), (64,), _TRAINING),
        ids=ids[:, None],
        hot_rows={access.table: access.rows[:cached].copy()},
        warmup=workload.warmup,
        lookups=workload.lookups,
        seed=turn,
        storage=folder,
    )


def _run(limit: MemoryLimit, job: Job, side: FileSide, folder: Path) -> Trained:
    from recd_plugin_scars.benchmarks import file_store_process as process

    if side == OURS:
        return limit.run(process.train_file_store, job, limit)
    file = folder / "mapped"
    return limit.run(process.train_mapped, job, limit, file, side == "mapped, MADV_RANDOM")
