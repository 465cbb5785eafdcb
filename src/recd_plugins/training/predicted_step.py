"""A step before there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import click
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

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
from recd_plugins.values.stages import StageTimes
from recd_plugins.values.work import Work


@dataclass(frozen=True)
class PredictedStep:
    """A step as the measured costs of its ranks have it.

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
    """A step, on rank 0; None on others, and where no costs were measured, or are all 0.

    Args:
        prepared: the model before it was sharded.
        dmp: the sharded model.
        tables: of the model, ``all_tables_of`` before it was sharded.
        profile: of the features.
        device: of this rank.
        topology: that was measured; None for what the registry names.

    Raises:
        RecdError: the operations of the model cannot be counted.
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
    """With equal gradients of tables alone whose sharded modules send them once."""
    tables = {
        name
        for module in dmp.modules()
        if isinstance(module, ExactShardedEmbeddingCollection) and module.sends_equal_gradients_once
        for name in module.module_sharding_plan
    }
    gradients = {name: known for name, known in profile.gradients.items() if name in tables}
    return replace(profile, gradients=gradients)
