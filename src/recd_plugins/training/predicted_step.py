"""A step before there is one, and whether ranks gain by sending while they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.distributed.pipeline import is_overlapped
from recd_plugins.interfaces import Table
from recd_plugins.model.deferred_tables import generators_kept
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.machines import machine_of
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.stage_times import predict_stages
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.planning.work import work_of_step
from recd_plugins.training.agreement import together
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stages import StageTimes
from recd_plugins.values.work import Work

# Of a step, that overlap is to gain: it costs processors some.
_LEAST_GAIN = 0.03


@dataclass(frozen=True)
class PredictedStep:
    """A step as the measured costs of its ranks have it.

    Attributes:
        stages: mean over ranks.
        works: of each rank.
        overlapped: whether ranks send while they compute.
    """

    stages: StageTimes
    works: Sequence[Work]
    overlapped: bool


def predict_step(
    prepared: Prepared,
    dmp: DistributedModelParallel,
    tables: Sequence[Table],
    profile: DataProfile,
    device: torch.device,
    topology: TopologySpec | None,
) -> tuple[Prepared, PredictedStep | None]:
    """The step, and ``training.overlap`` as it gains where nobody has asked. A collective call.

    Args:
        prepared: the model before it was sharded.
        dmp: the sharded model.
        tables: of the model.
        profile: of the features.
        device: of this rank.
        topology: that was measured; None for what the registry names.

    Returns:
        ``prepared`` with what was decided; None where no costs were measured.

    Raises:
        RecdError: the operations of the model cannot be counted.
    """
    training = prepared.registry.training
    if topology is None and training.topology is None:
        return prepared, None
    spec = topology or machine_of(training, device=device)
    if spec.costs is None:
        return prepared, None

    def predicted() -> PredictedStep | None:
        return _predicted(prepared, dmp, tables, profile, spec) if dist.get_rank() == 0 else None

    step = together(predicted)[0]
    assert step is not None, "of rank 0"
    if training.overlap is None and not step.overlapped:
        registry = prepared.registry.with_training({"overlap": False})
        prepared = replace(prepared, registry=registry)
    return prepared, step


def _predicted(
    prepared: Prepared,
    dmp: DistributedModelParallel,
    tables: Sequence[Table],
    profile: DataProfile,
    spec: TopologySpec,
) -> PredictedStep:
    registry, costs = prepared.registry, spec.costs
    assert costs is not None, "they were looked for"
    with generators_kept():
        compute = measure_compute(registry)

    def step(*, overlapped: bool) -> PredictedStep:
        works = work_of_step(
            tables,
            dmp.plan,
            profile,
            compute,
            batch_size=registry.training.batch_size,
            world_size=spec.world_size,
            local_world_size=spec.ranks_per_node,
            parts=prepared.checked_parts,
            wire=registry.training.wire,
            overlapped=overlapped,
            gloo=spec.device == "cpu",
        )
        stages = predict_stages(works, costs, overlapped=overlapped)
        return PredictedStep(stages, works, overlapped)

    in_turn = step(overlapped=False)
    if not is_overlapped(dmp, torch.device(spec.device), registry):
        return in_turn
    ahead = step(overlapped=True)
    gains = in_turn.stages.total - ahead.stages.total
    asked = registry.training.overlap is not None
    return ahead if asked or gains >= _LEAST_GAIN * in_turn.stages.total else in_turn
