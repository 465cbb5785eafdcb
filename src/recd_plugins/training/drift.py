"""Steps as they were predicted, and as they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import click
import torch

from recd_plugins.distributed.pipeline import is_overlapped
from recd_plugins.model.deferred_tables import generators_kept
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.machines import machine_of
from recd_plugins.planning.stage_times import predict_stages
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.planning.work import work_of_step
from recd_plugins.training.assembly import Assembled
from recd_plugins.training.breakdown import StepProfile
from recd_plugins.training.meter import Meter
from recd_plugins.values.stages import STAGES, Stage, StageTimes

#: By what factor a step may be off before that is said.
MOST_OFF = 1.5
# Timed steps until it is looked at.
_STEPS = 20


@dataclass(frozen=True)
class Prediction:
    """A step as the measured costs of the topology have it, next to those that were timed.

    Attributes:
        predicted: by stage.
        measured_seconds: of a step, the median.
        stages: as they were profiled, where they were.
    """

    predicted: StageTimes
    measured_seconds: float
    stages: StageTimes | None

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured_seconds / self.predicted.total

    @property
    def off(self) -> bool:
        """Whether they are further apart than ``MOST_OFF``."""
        return not 1 / MOST_OFF <= self.factor <= MOST_OFF

    @property
    def most_off(self) -> Stage | None:
        """The stage that differs most; None where stages were not profiled."""
        if self.stages is None:
            return None
        measured, predicted = self.stages.as_dict(), self.predicted.as_dict()
        return max(STAGES, key=lambda stage: abs(measured[stage] - predicted[stage]))

    def as_json(self) -> Mapping[str, Any]:
        """JSON values."""
        return {
            "seconds": self.predicted.total,
            "stages": self.predicted.as_dict(),
            "measured_seconds": self.measured_seconds,
            "factor": self.factor,
            "most_off": self.most_off,
        }

    def __str__(self) -> str:
        line = (
            f"a step takes {self.measured_seconds * 1e3:,.1f} ms and was predicted to take "
            f"{self.predicted.total * 1e3:,.1f}"
        )
        if not self.off:
            return line
        line += f", off by {max(self.factor, 1 / self.factor):.1f}x"
        if self.most_off is None or self.stages is None:
            where = ": --breakdown shows in which stage"
        else:
            stage = self.most_off
            where = (
                f", most in {stage.replace('_', '-')}: {getattr(self.stages, stage) * 1e3:,.1f} ms "
                f"and {getattr(self.predicted, stage) * 1e3:,.1f}"
            )
        return f"{line}{where}; recd calibrate measures the cluster as it is now"


def predicted_step(parts: Assembled, topology: TopologySpec) -> StageTimes | None:
    """A step of what is trained with plugins; None on ranks whose costs were not measured."""
    if parts.setting is None or topology.costs is None:
        return None
    registry = parts.prepared.registry
    device = torch.device(topology.device)
    overlapped = is_overlapped(parts.dmp, device, registry)
    with generators_kept():
        compute = measure_compute(registry)
    works = work_of_step(
        parts.tables,
        parts.dmp.plan,
        parts.setting.data.profile(),
        compute,
        batch_size=registry.training.batch_size,
        world_size=topology.world_size,
        local_world_size=topology.ranks_per_node,
        parts=parts.prepared.checked_parts,
        wire=registry.training.wire,
        overlapped=overlapped,
    )
    return predict_stages(works, topology.costs, overlapped=overlapped)


class Drift:
    """Compares steps of a run with what was predicted, and says once where they are apart.

    Args:
        predicted: a step.
        profile: of steps, where some are profiled.
    """

    def __init__(self, predicted: StageTimes, profile: StepProfile) -> None:
        self._predicted, self._profile = predicted, profile
        self._looked = False

    @classmethod
    def of_run(
        cls,
        parts: Assembled,
        topology: TopologySpec | None,
        device: torch.device,
        profile: StepProfile,
    ) -> Self | None:
        """Of what is trained with plugins on ranks whose costs were measured; None of all else.

        Args:
            parts: sharded.
            topology: that was measured; None for what the registry names.
            device: of this rank.
            profile: of steps, where some are profiled.
        """
        registry = parts.prepared.registry
        if parts.setting is None or (topology is None and registry.training.topology is None):
            return None
        spec = topology or machine_of(registry.training, device=device)
        predicted = predicted_step(parts, spec)
        return None if predicted is None else cls(predicted, profile)

    def look(self, meter: Meter) -> None:
        """After a step: enough of them were timed, or not yet."""
        if self._looked or meter.timed_steps < _STEPS:
            return
        self._looked = True
        stages = self._profile.stages() if self._profile.complete else None
        found = self.of(meter, stages)
        if found is not None and found.off:
            click.echo(str(found), err=True)

    def of(self, meter: Meter, stages: StageTimes | None) -> Prediction | None:
        """What came of it; None where no step was timed."""
        seconds = meter.step_seconds()
        if not seconds:
            return None
        return Prediction(self._predicted, statistics.median(seconds), stages)
