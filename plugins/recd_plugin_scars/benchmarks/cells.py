"""Criteo-like tables, plain / coalesced / cached / both: bytes of the backing store, and time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recd_plugin_scars.benchmarks.criteo import (
    CACHE_BYTES,
    EMBEDDING_DIM,
    FEATURES,
    ScaledCriteo,
    draw,
)
from recd_plugin_scars.benchmarks.model import Shape
from recd_plugin_scars.benchmarks.trainers import Job, Side, Trained, measure
from recd_plugin_scars.planning import CachePlan, TableLoad, TableTraffic
from recd_plugins.api.distributed import Ranks
from recd_plugins.api.registry import TrainingSpec
from recd_plugins.testing.benchmark import Detail, Figure, largest

# Rates that do not amplify rounding: losses are compared.
TRAINING = TrainingSpec(learning_rate=0.02, dense_learning_rate=0.01, eps=1e-3)
PLAIN, BOTH = "plain", "both"
SIDES: Mapping[str, Side] = {
    PLAIN: Side("host"),
    "coalesced": Side("cache", cached=False, coalesced=True),
    "cached": Side("cache"),
    BOTH: Side("cache", coalesced=True),
    "both, lookahead": Side("cache", coalesced=True, lookahead=True),
    "both, lfu": Side("cache", "lfu", coalesced=True),
    "both, lru": Side("cache", "lru", coalesced=True),
    "stock": Side("stock"),
}
BYTES_TABLE = "the backing store in a step"
# Zipf's exponents besides 1.1, of which bytes alone are measured.
_OTHER_EXPONENTS = (1.0, 1.2)


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        scale: rows, cache and batch are fewer by it.
        other_scale: of the other exponents.
        num_batches: of each side.
        warmup: of them, not timed.
        turns: of all sides.
        bottom, top: widths of the dense layers.
    """

    scale: int
    other_scale: int
    num_batches: int
    warmup: int
    turns: int
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64,)


@dataclass(frozen=True, eq=False)
class PlannedBatches:
    """Batches, and what a plan says of them."""

    job: Job
    plan: CachePlan

    def predicted(self, side: str) -> float:
        """Bytes of the backing store in a step, read and written."""
        tables = self._tables(SIDES[side])
        if side == PLAIN:
            # Embeddings and gradients: no state leaves the host.
            return sum(2 * table.lookups * table.weight_bytes for table in tables)
        return sum(table.bytes for table in tables)

    def misses(self, side: str) -> float:
        """Rows that are read in a step."""
        return sum(table.misses for table in self._tables(SIDES[side]))

    def _tables(self, side: Side) -> list[TableTraffic]:
        """Of a kernel: it moves a row once a batch, whether its ids are coalesced or not."""
        loads = {name: table.load for name, table in self.plan.tables.items()}
        plan = CachePlan.of(
            loads,
            {name: table.cached for name, table in self.plan.tables.items()} if side.cached else {},
            batch_size=self.plan.batch_size,
            optimizer=self.plan.optimizer,
            held=float(side.lookahead),
        )
        return [table.traffic for table in plan.tables.values()]


def prepare(
    criteo: ScaledCriteo, num_batches: int, warmup: int, shape: Shape, device: str = "cpu"
) -> PlannedBatches:
    """Draw batches and plan the cache.

    Args:
        criteo: the tables.
        num_batches: to draw.
        warmup: see ``Job``.
        shape: of the model.
        device: of the fast memory and the dense layers.
    """
    rng = np.random.default_rng((criteo.seed, 1))
    loads, ids = {}, []
    for access in criteo.accesses():
        loads[access.table] = TableLoad(access, EMBEDDING_DIM)
        ids.append(draw(access, rng, num_batches, criteo.batch_size))
    plan = CachePlan.within(
        loads,
        CACHE_BYTES // criteo.scale,
        batch_size=criteo.batch_size,
        optimizer=shape.training.optimizer,
    )
    hot_rows = {name: table.hot_rows.copy() for name, table in plan.tables.items()}
    return PlannedBatches(Job(shape, np.stack(ids, 1), hot_rows, warmup, device), plan)


def criteo_shape(criteo: ScaledCriteo, bottom: tuple[int, ...], top: tuple[int, ...]) -> Shape:
    """A model over the tables."""
    return Shape(FEATURES, criteo.rows, EMBEDDING_DIM, bottom, top, TRAINING)


@dataclass(frozen=True)
class Cells:
    """What was measured.

    Attributes:
        workload: of it.
        trained: by side and turn.
        predicted: bytes of a step by side.
        batch_size: samples.
        steps: that were counted.
        others: by exponent, plain and both.
    """

    workload: Workload
    trained: Mapping[str, Sequence[Trained]]
    predicted: Mapping[str, float]
    batch_size: int
    steps: int
    others: Mapping[float, tuple[Trained, Trained]]

    def counted(self, side: str) -> float:
        """Bytes of a step, of both directions."""
        return self.trained[side][0].bytes / self.steps

    def error(self, side: str) -> float:
        """The error of the prediction, relative to it."""
        return abs(self.counted(side) / self.predicted[side] - 1)

    @property
    def loss_max_abs_diff(self) -> float:
        """The largest difference of the loss of any side and step from that of the plain one."""
        plain = np.array(self.trained[PLAIN][0].losses)
        runs = [run for side in self.trained.values() for run in side]
        return largest(float(np.abs(np.array(run.losses) - plain).max()) for run in runs)

    def speeds(self, side: str) -> list[float]:
        """Samples a second over the plain side, by turn."""
        pairs = zip(self.trained[PLAIN], self.trained[side], strict=True)
        return [plain.step_seconds / other.step_seconds for plain, other in pairs]

    def figures(self) -> list[Figure]:
        """All figures."""
        return [
            Figure.of(
                "backing_store_traffic_reduction",
                [self.counted(PLAIN) / self.counted(BOTH)],
                unit="ratio",
                better="higher",
                goal=30,
            ),
            *(
                Figure.of(
                    f"backing_store_traffic_reduction_zipf_{exponent:g}",
                    [plain.bytes / both.bytes],
                    unit="ratio",
                    better="higher",
                )
                for exponent, (plain, both) in self.others.items()
            ),
            Figure.of(
                "prediction_error",
                [max(self.error(side) for side in self.predicted)],
                unit="ratio",
                better="lower",
                goal=0.02,
            ),
            *(
                Figure.of(
                    f"miss_rate_{SIDES[side].policy}",
                    [self.trained[side][0].miss_rate],
                    unit="ratio",
                    better="lower",
                )
                for side in (BOTH, "both, lfu", "both, lru")
            ),
            *(
                Figure.of(
                    f"samples_per_second_{_name(side)}_over_plain",
                    self.speeds(side),
                    unit="ratio",
                    better="higher",
                )
                for side in self.trained
                if side != PLAIN
            ),
            Figure.of(
                "loss_max_abs_diff",
                [self.loss_max_abs_diff],
                unit="loss",
                better="lower",
                goal=1e-6,
            ),
        ]

    def details(self) -> list[Detail]:
        """A table by side, of a step: bytes counted and predicted, both ways; rows, and time."""
        headings = [
            "",
            "MB read",
            "MB written",
            "MB predicted",
            "rows",
            "misses",
            "ms",
            "samples/s",
        ]
        rows: list[list[str | float]] = []
        for side, runs in self.trained.items():
            first, seconds = runs[0], statistics.median(run.step_seconds for run in runs)
            moved: list[str | float] = (
                [first.bytes_read / self.steps / 1e6, first.bytes_written / self.steps / 1e6]
                if first.bytes
                else ["", ""]
            )
            rows.append(
                [
                    side,
                    *moved,
                    self.predicted[side] / 1e6 if side in self.predicted else "",
                    first.traffic.unique_rows / self.steps or "",
                    first.traffic.misses / self.steps if first.traffic.unique_rows else "",
                    1e3 * seconds,
                    self.batch_size / seconds,
                ]
            )
        return [Detail(BYTES_TABLE, headings, rows)]

    def notes(self) -> list[str]:
        """How it was counted."""
        return [
            f"traffic: {self.steps} batches of {self.batch_size} samples, "
            f"{CACHE_BYTES // self.workload.scale / 2**20:.3g} MiB of cached rows with state. "
            "plain: stock FBGEMM tables on the host, of which embeddings and gradients are counted "
            "that pass between table and model; the others: rows with their state, counted where "
            "they are moved. On the CPU both are the same memory, so that time shows what a "
            "cache costs there and not what it saves"
        ]


def measure_cells(workload: Workload, threads: int | None = None) -> Cells:
    """Train all sides, one after the other, in turns; with torch's threads, all cores without."""
    prepared = _prepared(workload, ScaledCriteo(workload.scale))
    trained: dict[str, list[Trained]] = {name: [] for name in SIDES}
    with Ranks(1, threads=threads) as ranks:
        for _ in range(workload.turns):
            for name, side in SIDES.items():
                (found,) = ranks.run(measure, prepared.job, side)
                trained[name].append(found)
        others = {}
        for other in _OTHER_EXPONENTS:
            job = _prepared(workload, ScaledCriteo(workload.other_scale, other)).job
            plain, both = (ranks.run(measure, job, SIDES[name])[0] for name in (PLAIN, BOTH))
            others[other] = plain, both
    # Of these bytes are counted; not by what a counter says, which would hide one that says 0.
    counted = [
        name
        for name, side in SIDES.items()
        if side.policy == "static" and side.tables in ("host", "cache")
    ]
    return Cells(
        workload,
        trained,
        {name: prepared.predicted(name) for name in counted},
        prepared.job.batch_size,
        len(prepared.job.ids),
        others,
    )


def _prepared(workload: Workload, criteo: ScaledCriteo) -> PlannedBatches:
    shape = criteo_shape(criteo, workload.bottom, workload.top)
    return prepare(criteo, workload.num_batches, workload.warmup, shape)


def _name(side: str) -> str:
    return side.replace(", ", "_")
