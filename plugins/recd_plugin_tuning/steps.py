"""``recd plan --calibrate``: fit the costs of a step to profiled training steps.

Steps of the registry's model run with and without plugins at three batch sizes. Costs are fitted to
the smallest and the largest, and judged by the one between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table as TextTable
from torchrec.distributed.types import ShardingPlan

from recd_plugins.api import (
    STAGES,
    Compute,
    Job,
    RunConfig,
    ShardableModel,
    Stage,
    StageCosts,
    StageTimes,
    StepCost,
    StepProfile,
    TopologySpec,
    Variant,
    assemble,
    backend_for,
    device_of_rank,
    estimate_step_cost,
    fit_costs,
    launch,
    measure_compute,
    predict_stages,
    silence_upstream,
    smallest_batch,
    steps_in_turns,
    with_plugins,
    wrapped_dataset,
)

SIDES: tuple[Variant, ...] = ("baseline", "plugins")
# A prediction is judged on stages that take at least this share of the step.
MEANINGFUL_SHARE = 0.03

# Steps of one batch size in a round.
_LEAD, _MEASURED = 1, 4
# Below this a stage is lost in the noise, and how far it is off counts no more.
_LEAST_SECONDS = 1e-4
_COMMUNICATION: tuple[Stage, ...] = ("all_to_all", "all_reduce")


@dataclass(frozen=True)
class CalibrationPoint:
    """One measured combination of side and batch size.

    Attributes:
        side: with the plugins or without.
        batch_size: rows of a rank.
        works: of each rank.
        ranks: measured seconds of each rank.
        fitted: whether the costs were fitted to it; else it shows how well they predict.
    """

    side: Variant
    batch_size: int
    works: Sequence[StepCost]
    ranks: Sequence[StageTimes]
    fitted: bool

    @property
    def measured(self) -> StageTimes:
        """Mean over ranks."""
        return StageTimes.mean(self.ranks)


@dataclass(frozen=True)
class Calibration:
    """Costs of this machine, and the points that they were fitted to and compared with."""

    costs: StageCosts
    points: Sequence[CalibrationPoint]

    @property
    def worst_factor(self) -> float:
        """How far a predicted stage is from the measured one at most: 1 is exact.

        Over points that the costs were not fitted to, and stages that took a meaningful share.
        """
        return max(
            max(predicted / measured, measured / predicted) if predicted else float("inf")
            for point in self.points
            if not point.fitted
            for _, measured, predicted in self._meaningful(point)
        )

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "costs": self.costs.model_dump(),
            "worst_factor": self.worst_factor,
            "points": [
                {
                    "side": point.side,
                    "batch_size": point.batch_size,
                    "fitted": point.fitted,
                    "measured_seconds": point.measured.as_dict(),
                    "predicted_seconds": predict_stages(point.works, self.costs).as_dict(),
                    "work_of_ranks": [asdict(work) for work in point.works],
                }
                for point in self.points
            ],
        }

    def table(self) -> TextTable:
        """Predicted next to measured, of the points that the costs were not fitted to."""
        table = TextTable(title="milliseconds of a step: predicted / measured")
        table.add_column("stage")
        shown = [point for point in self.points if not point.fitted]
        for point in shown:
            table.add_column(
                f"{point.side}, batch {point.batch_size}", justify="right", overflow="fold"
            )
        for stage in STAGES:
            table.add_row(stage.replace("_", "-"), *(self._cell(point, stage) for point in shown))
        table.caption = (
            f"stages of at least {MEANINGFUL_SHARE:.0%} of a step agree within a factor of "
            f"{self.worst_factor:.2f}; costs were fitted to other batch sizes"
        )
        return table

    def _cell(self, point: CalibrationPoint, stage: Stage) -> str:
        predicted = getattr(predict_stages(point.works, self.costs), stage)
        return f"{predicted * 1e3:.1f} / {getattr(point.measured, stage) * 1e3:.1f}"

    def _meaningful(self, point: CalibrationPoint) -> list[tuple[Stage, float, float]]:
        measured = point.measured.as_dict()
        predicted = predict_stages(point.works, self.costs).as_dict()
        return [
            (stage, measured[stage], predicted[stage])
            for stage in STAGES
            if measured[stage] >= MEANINGFUL_SHARE * point.measured.total
        ]


def calibrate(registry: RunConfig, job: Job, spec: TopologySpec, *, rounds: int = 6) -> Calibration:
    """Profile training steps on ranks of this machine, and fit costs to them.

    Args:
        registry: its ``training.ranks`` ranks are started.
        job: the registry file with overrides, and the device.
        spec: the ranks; its bounds are the costs of work that no step does.
        rounds: in each, every side and batch size is profiled.
    """
    ranks = registry.training.ranks
    together = smallest_batch(wrapped_dataset(registry))
    sizes = batch_sizes(registry.training.batch_size, together)
    by_rank = launch(_profile_sides, ranks, job, sizes, rounds, backend=backend_for(job.device))
    plugins = with_plugins(registry, spec)
    candidates = {"plugins": plugins, "baseline": plugins.as_plain()}
    compute = measure_compute(registry)
    measured = [
        CalibrationPoint(
            side,
            size,
            works_of(candidates[side], by_rank[0][side][1], compute, size, ranks, job.device),
            [sides[side][0][size] for sides in by_rank],
            fitted=size != sizes[1],
        )
        for side in SIDES
        for size in sizes
    ]
    costs = fit([point for point in measured if point.fitted], spec.least_costs)
    return Calibration(costs, measured)


def works_of(
    candidate: ShardableModel,
    plan: ShardingPlan,
    compute: Compute,
    batch_size: int,
    ranks: int,
    device_type: str,
) -> list[StepCost]:
    """The work of each rank in a step of one side, whose ranks are of one node."""
    return estimate_step_cost(
        candidate.tables,
        plan,
        candidate.profile,
        compute,
        batch_size=batch_size,
        world_size=ranks,
        parts=candidate.prepared.checked_parts,
        wire=candidate.prepared.registry.training.wire,
        gloo=device_type == "cpu",
    )


def fit(points: Sequence[CalibrationPoint], costs: StageCosts) -> StageCosts:
    """The costs, none negative, whose relative errors at ``points`` have the least squares.

    Args:
        points: measured ones.
        costs: kept for work of which there was none.
    """
    fitted: dict[str, Any] = {}
    for stage in STAGES:
        before = getattr(costs, stage)
        names = list(type(before).model_fields)
        rows, seconds = [], []
        for point in points:
            for work, measured in _equations(point, stage):
                rows.append([getattr(work, name) for name in names])
                seconds.append(measured)
        found = fit_costs(np.array(rows), np.array(seconds), least=_LEAST_SECONDS)
        done = [any(row[column] for row in rows) for column in range(len(names))]
        fitted[stage] = before.model_copy(
            update={
                name: float(value)
                for name, value, was_done in zip(names, found, done, strict=True)
                if was_done
            }
        )
    return costs.model_copy(update=fitted)


def _equations(point: CalibrationPoint, stage: Stage) -> list[tuple[StepCost, float]]:
    """StepCost and the seconds that it took."""
    seconds = [getattr(times, stage) for times in point.ranks]
    if stage not in _COMMUNICATION:
        return list(zip(point.works, seconds, strict=True))
    # All ranks do it together. What one waits because it has less work is predicted from the work;
    # what all wait, now one and now another, is part of the cost.
    busiest = max(point.works, key=lambda work: work.bytes_in_node + work.bytes_across_nodes)
    across = fmean(work.bytes_across_nodes for work in point.works)
    own = [times.lookup + times.gemm + times.other for times in point.ranks]
    waiting = max(own) - fmean(own)
    together = replace(busiest, bytes_across_nodes=across)
    return [(together, max(min(seconds), fmean(seconds) - waiting))]


def batch_sizes(batch_size: int, together: int) -> tuple[int, int, int]:
    """Two to fit and between them one to predict: the largest is the registry's own.

    All are multiples of the rows that wrappers of the dataset hand out together.
    """
    count = batch_size // together
    small, middle, large = max(1, count // 4), max(2, count // 2), max(3, count)
    return together * small, together * middle, together * large


def _profile_sides(
    rank: int, world_size: int, job: Job, sizes: Sequence[int], rounds: int
) -> dict[Variant, tuple[dict[int, StageTimes], ShardingPlan]]:
    """Stage times of this rank by batch size, and the plan, of each side."""
    silence_upstream()
    return {side: _profile_side(rank, world_size, job, side, sizes, rounds) for side in SIDES}


def _profile_side(
    rank: int, world_size: int, job: Job, side: Variant, sizes: Sequence[int], rounds: int
) -> tuple[dict[int, StageTimes], ShardingPlan]:
    registry = job.load().with_training({"batch_size": max(sizes)})
    device = device_of_rank(job.device)
    parts = assemble(registry, side, device)
    profiles = {size: StepProfile(device, warmup=0) for size in sizes}
    for size, step in steps_in_turns(
        parts, rank, world_size, device, sizes, rounds=rounds, lead=_LEAD, measured=_MEASURED
    ):
        with profiles[size].step():
            step()
    return {size: profiles[size].stages() for size in sizes}, parts.dmp.plan
