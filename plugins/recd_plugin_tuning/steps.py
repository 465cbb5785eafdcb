"""``recd plan --calibrate``: fit the costs of a step to profiled training steps.

Costs are fitted to the smallest and largest of three batch sizes, and checked on the middle one.
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
    Job,
    RunConfig,
    StepCost,
    Variant,
    backend_for,
    build_sharded_model,
    devices,
    imports,
    launch,
    measure_compute,
    measurements,
    prepared_data,
    sessions,
    stage_costs,
    step_costs,
    study,
    text_table,
    topologies,
    wrapped_dataset,
)

VARIANTS: tuple[Variant, ...] = ("baseline", "plugins")
# Predictions are checked for stages that take at least this share of the step.
MEANINGFUL_SHARE = 0.03
# Steps per batch size in a round: warm-up steps, then measured steps.
_LEAD, _MEASURED = 1, 4
# Shorter stages cannot be told from noise.
_LEAST_SECONDS = 1e-4
_COMMUNICATION: tuple[stage_costs.Stage, ...] = ("all_to_all", "all_reduce")


@dataclass(frozen=True)
class CalibrationPoint:
    """A measurement of a variant and batch size.

    Attributes:
        variant: with or without plugins.
        batch_size: rows per rank.
        works: work of each rank.
        ranks: measured seconds of each rank.
        fitted: whether costs are fitted to it; else it checks them.
    """

    variant: Variant
    batch_size: int
    works: Sequence[StepCost]
    ranks: Sequence[stage_costs.StageTimes]
    fitted: bool

    @property
    def measured(self) -> stage_costs.StageTimes:
        """Return the mean over ranks."""
        return stage_costs.StageTimes.mean(self.ranks)


@dataclass(frozen=True)
class Calibration:
    """Costs of this machine, and the measured points."""

    costs: stage_costs.StageCosts
    points: Sequence[CalibrationPoint]

    @property
    def worst_factor(self) -> float:
        """Return the largest factor between predicted and measured stages of the check points."""
        factors = [1.0]
        for point in self.points:
            measured, predicted = point.measured, step_costs.predict_stages(point.works, self.costs)
            for stage in () if point.fitted else stage_costs.STAGES:
                seconds, expected = getattr(measured, stage), getattr(predicted, stage)
                if seconds >= MEANINGFUL_SHARE * measured.total:
                    ratio = expected / seconds
                    factors.append(max(ratio, 1 / ratio) if ratio else float("inf"))
        return max(factors)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "costs": self.costs.model_dump(),
            "worst_factor": self.worst_factor,
            "points": [
                {
                    "variant": point.variant,
                    "batch_size": point.batch_size,
                    "fitted": point.fitted,
                    "measured_seconds": point.measured.as_dict(),
                    "predicted_seconds": step_costs.predict_stages(
                        point.works, self.costs
                    ).as_dict(),
                    "work_of_ranks": [asdict(work) for work in point.works],
                }
                for point in self.points
            ],
        }

    def table(self) -> TextTable:
        """Return predicted and measured stages of the check points."""
        points = [point for point in self.points if not point.fitted]
        caption = (
            f"stages of at least {MEANINGFUL_SHARE:.0%} of a step agree within a factor of "
            f"{self.worst_factor:.2f}; costs were fitted to other batch sizes"
        )
        headings = [f"{point.variant}, batch {point.batch_size}" for point in points]
        title = "milliseconds of a step: predicted / measured"
        table = text_table(title, ["stage"], headings, caption=caption)
        for stage in stage_costs.STAGES:
            cells = (
                f"{getattr(step_costs.predict_stages(point.works, self.costs), stage) * 1e3:.1f} / "
                f"{getattr(point.measured, stage) * 1e3:.1f}"
                for point in points
            )
            table.add_row(stage.replace("_", "-"), *cells)
        return table


def calibrate(
    registry: RunConfig, job: Job, spec: topologies.TopologySpec, *, rounds: int = 6
) -> Calibration:
    """Profile training steps on ranks of this machine, and fit costs to them.

    Args:
        registry: its ``training.ranks`` ranks are started.
        job: the registry file with overrides, and the device.
        spec: the topology; its lower bounds remain for work that no step does.
        rounds: number of rounds over variants and batch sizes.
    """
    ranks = registry.training.ranks
    together = prepared_data.smallest_batch(wrapped_dataset(registry))
    sizes = batch_sizes(registry.training.batch_size, together)
    by_rank = launch(_profile_sides, ranks, job, sizes, rounds, backend=backend_for(job.device))
    plugins = study.with_plugins(registry, spec)
    candidates = {"plugins": plugins, "baseline": plugins.as_plain()}
    compute = measure_compute(registry)
    measured = [
        CalibrationPoint(
            variant,
            size,
            works_of(candidates[variant], by_rank[0][variant][1], compute, size, ranks, job.device),
            [variants[variant][0][size] for variants in by_rank],
            fitted=size != sizes[1],
        )
        for variant in VARIANTS
        for size in sizes
    ]
    costs = fit([point for point in measured if point.fitted], spec.least_costs)
    return Calibration(costs, measured)


def works_of(
    candidate: study.ShardableModel,
    plan: ShardingPlan,
    compute: step_costs.Compute,
    batch_size: int,
    ranks: int,
    device_type: str,
) -> list[StepCost]:
    """Return the work of each rank in a step of a variant, on one node."""
    return step_costs.estimate_step_cost(
        candidate.tables,
        plan,
        candidate.profile,
        compute,
        batch_size=batch_size,
        world_size=ranks,
        parts=candidate.prepared.plugin_strategies,
        wire=candidate.prepared.registry.training.wire,
        gloo=device_type == "cpu",
    )


def fit(
    points: Sequence[CalibrationPoint], costs: stage_costs.StageCosts
) -> stage_costs.StageCosts:
    """Fit costs to measured points. ``costs`` remain for work that does not occur in any point."""
    fitted: dict[str, Any] = {}
    for stage in stage_costs.STAGES:
        before = getattr(costs, stage)
        names = list(type(before).model_fields)
        equations = [each for point in points for each in _equations(point, stage)]
        work = np.array([[getattr(each, name) for name in names] for each, _ in equations])
        seconds = np.array([seconds for _, seconds in equations])
        found = step_costs.fit_costs(work, seconds, least=_LEAST_SECONDS).tolist()
        done = zip(names, found, work.T, strict=True)
        update = {name: value for name, value, column in done if column.any()}
        fitted[stage] = before.model_copy(update=update)
    return costs.model_copy(update=fitted)


def _equations(point: CalibrationPoint, stage: stage_costs.Stage) -> list[tuple[StepCost, float]]:
    """Return works with their seconds."""
    seconds = [getattr(times, stage) for times in point.ranks]
    if stage not in _COMMUNICATION:
        return list(zip(point.works, seconds, strict=True))
    # One equation for all ranks. Waiting for the busiest rank is predicted from the work; random
    # waiting is part of the cost.
    busiest = max(point.works, key=lambda work: work.bytes_in_node + work.bytes_across_nodes)
    across = fmean(work.bytes_across_nodes for work in point.works)
    own = [times.lookup + times.gemm + times.other for times in point.ranks]
    waiting = max(own) - fmean(own)
    together = replace(busiest, bytes_across_nodes=across)
    return [(together, max(min(seconds), fmean(seconds) - waiting))]


def batch_sizes(batch_size: int, together: int) -> tuple[int, int, int]:
    """Return three batch sizes, all multiples of ``together``."""
    count = batch_size // together
    small, middle, large = max(1, count // 4), max(2, count // 2), max(3, count)
    return together * small, together * middle, together * large


def _profile_sides(
    rank: int, world_size: int, job: Job, sizes: Sequence[int], rounds: int
) -> dict[Variant, tuple[dict[int, stage_costs.StageTimes], ShardingPlan]]:
    """Return stage times of this rank by batch size, and the plan, of each variant."""
    imports.silence_upstream()
    found: dict[Variant, tuple[dict[int, stage_costs.StageTimes], ShardingPlan]] = {}
    for variant in VARIANTS:
        registry = job.load().with_training({"batch_size": max(sizes)})
        device = devices.device_of_rank(job.device)
        parts = build_sharded_model(registry, variant, device)
        profiles = {size: measurements.StepProfile(device, warmup=0) for size in sizes}
        for size, step in sessions.steps_in_turns(
            parts, rank, world_size, device, sizes, rounds=rounds, lead=_LEAD, measured=_MEASURED
        ):
            with profiles[size].step():
                step()
        found[variant] = {size: profiles[size].stages() for size in sizes}, parts.dmp.plan
    return found
