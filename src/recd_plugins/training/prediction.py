"""The predicted step of a run, and how far the timed steps are from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.data.stalls import STALL_TARGET, Stalls
from recd_plugins.distributed.pipeline import is_overlapped
from recd_plugins.distributed.row_wise_adagrad import learns_by_fbgemm
from recd_plugins.distributed.sharded_sequences import ExactShardedEmbeddingCollection
from recd_plugins.generators import generators_kept
from recd_plugins.interfaces import Table
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.machines import machine_of
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.stage_times import predict_stages
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.planning.work import work_of_step
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stages import STAGES, Stage, StageTimes
from recd_plugins.values.work import Work

#: The factor by which a prediction may be off.
MOST_OFF = 1.5
_FEW_STEPS = 20


@dataclass(frozen=True)
class PredictedStep:
    """A step by the measured costs of the ranks.

    Attributes:
        stages: mean over ranks.
        works: of each rank.
    """

    stages: StageTimes
    works: Sequence[Work]


def predict_step(
    prepared: Prepared,
    dmp: DistributedModelParallel,
    tables: Sequence[Table],
    profile: DataProfile,
    device: torch.device,
    topology: TopologySpec | None,
) -> PredictedStep | None:
    """Predict a step, on rank 0; None on others, and if no costs were measured.

    Args:
        prepared: the model before it was sharded.
        dmp: the sharded model.
        tables: of the model, ``all_tables_of`` before it was sharded.
        profile: of the features.
        device: of this rank.
        topology: that was measured; None for what the registry names.
    """
    registry = prepared.registry
    if dist.get_rank() or (topology is None and registry.training.topology is None):
        return None
    spec = topology or machine_of(registry.training, device=device)
    if spec.costs is None:
        return None
    with generators_kept():
        compute = measure_compute(registry)
    overlapped = is_overlapped(dmp, torch.device(spec.device), registry)
    works = work_of_step(
        tables,
        dmp.plan,
        _as_sent(profile, dmp),
        compute,
        batch_size=registry.training.batch_size,
        world_size=spec.world_size,
        local_world_size=spec.ranks_per_node,
        parts=prepared.checked_parts,
        wire=registry.training.wire,
        overlapped=overlapped,
        gloo=spec.device == "cpu",
        learns_by_fbgemm=learns_by_fbgemm(dmp),
    )
    stages = predict_stages(works, spec.costs, overlapped=overlapped)
    if stages.total == 0:
        click.echo("no step is predicted: the costs of the topology come to 0 seconds", err=True)
        return None
    return PredictedStep(stages, works)


def _as_sent(profile: DataProfile, dmp: DistributedModelParallel) -> DataProfile:
    """Keep equal gradients only of tables whose modules deduplicate gradients."""
    tables = {
        name
        for module in dmp.modules()
        if isinstance(module, ExactShardedEmbeddingCollection) and module.sends_equal_gradients_once
        for name in module.module_sharding_plan
    }
    gradients = {name: known for name, known in profile.gradients.items() if name in tables}
    return replace(profile, gradients=gradients)


@dataclass(frozen=True)
class Prediction:
    """A predicted step next to timed ones.

    Attributes:
        predicted: by stage.
        measured_seconds: of a step, the median.
        stages: as profiled, if they were.
        waiting_seconds: of a step, for data.
        timed_steps: that the median is of.
    """

    predicted: StageTimes
    measured_seconds: float
    stages: StageTimes | None
    waiting_seconds: float = 0.0
    timed_steps: int = _FEW_STEPS

    @classmethod
    def of(
        cls,
        predicted: StageTimes,
        seconds: Sequence[float],
        stages: StageTimes | None,
        stalls: Stalls | None,
    ) -> Prediction | None:
        """Compare with the seconds of timed steps; None without any."""
        if not seconds:
            return None
        waiting = 0.0 if stalls is None else sum(stalls.seconds.values())
        return cls(predicted, statistics.median(seconds), stages, waiting, len(seconds))

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured_seconds / self.predicted.total

    @property
    def most_off(self) -> Stage | None:
        """The stage that differs most, if stages were profiled."""
        if self.stages is None:
            return None
        measured, predicted = self.stages.as_dict(), self.predicted.as_dict()
        return max(STAGES, key=lambda stage: abs(measured[stage] - predicted[stage]))

    def as_json(self) -> Mapping[str, Any]:
        """Return JSON values."""
        return {
            "seconds": self.predicted.total,
            "stages": self.predicted.as_dict(),
            "measured_seconds": self.measured_seconds,
            "waiting_seconds": self.waiting_seconds,
            "timed_steps": self.timed_steps,
            "factor": self.factor,
            "most_off": self.most_off,
        }

    def __str__(self) -> str:
        waiting = ""
        if self.factor > MOST_OFF and self.waiting_seconds > STALL_TARGET * self.measured_seconds:
            waiting = f", of which {self.waiting_seconds * 1e3:,.1f} wait for data,"
        line = (
            f"a step takes {self.measured_seconds * 1e3:,.1f} ms{waiting} and was predicted to "
            f"take {self.predicted.total * 1e3:,.1f}"
        )
        if 1 / MOST_OFF <= self.factor <= MOST_OFF:
            return line
        if self.timed_steps < _FEW_STEPS:
            return f"{line}; {self.timed_steps} timed are too few to judge by, take {_FEW_STEPS}"
        line += f", off by {max(self.factor, 1 / self.factor):.1f}x"
        where = ": --breakdown shows in which stage"
        if self.most_off is not None and self.stages is not None:
            stage = self.most_off
            where = (
                f", most in {stage.replace('_', '-')}: {getattr(self.stages, stage) * 1e3:,.1f} ms "
                f"and {getattr(self.predicted, stage) * 1e3:,.1f}"
            )
        return f"{line}{where}; recd calibrate measures the cluster as it is now"
