"""Measures what replicated rows take in memory: M and c of FlexShard's cost model.

Training steps of a tiered EmbeddingCollection are profiled at a few sizes of its hot tier. A row of
it takes its copy with optimizer state, what finds it, and buffers of the step, as its gradient: M
rows in all. An access of it saves c embeddings on the way to other ranks and back. Both are fitted
to the memory at the fullest moment of a step; one more size shows how well they predict that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.planning.sections import TierMemory
from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.distributed import backend_for, device_of_rank, fused_params, launch
from recd_plugins.api.planning import fit_costs
from recd_plugins.api.registry import TrainingSpec
from recd_plugins.api.training import StepProfile

_BYTES_PER_SCALAR = 4
# Accesses of a rank and step: enough for small buffers not to count, few enough to take no time.
_LEAST_LOOKUPS, _MOST_LOOKUPS = 2**12, 2**14
# Hot rows over accesses of a step, and the share of the accesses that they have: none, which is the
# plain row-wise table, and such as plans come to. All but the last are fitted.
_SIZES = ((0.0, 0.0), (0.125, 0.3), (0.125, 0.7), (0.5, 0.3), (0.5, 0.7), (0.25, 0.5))
_ROWS_PER_LOOKUP = 4
# Each second step is profiled. Where gloo lets go of a tensor late, one shows more than others.
_WARMUP, _MEASURED = 2, 10


@dataclass(frozen=True)
class MemoryPoint:
    """Memory of a rank at one size of the hot tier.

    Attributes:
        hot_bytes: weights of the hot rows.
        access_bytes: embeddings of the accesses that they have in a step.
        held_bytes: what the tier takes between steps.
        peak_bytes: above that at the fullest moment of a step, all of the collection's.
    """

    hot_bytes: float
    access_bytes: float
    held_bytes: float
    peak_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes at the fullest moment."""
        return self.held_bytes + self.peak_bytes


@dataclass(frozen=True)
class MemoryCalibration:
    """M and c, and how far they are off at a size that they were not fitted to.

    Attributes:
        memory: for a topology.
        points: the measured sizes.
        error: predicted over measured memory of the last of ``points``, less 1.
    """

    memory: TierMemory
    points: Sequence[MemoryPoint]
    error: float


def calibrate_memory(
    training: TrainingSpec,
    embedding_dim: int,
    lookups: float,
    *,
    world_size: int,
    ranks_per_node: int,
    device_type: str,
) -> MemoryCalibration:
    """Train a few steps on ranks that are started here.

    Args:
        training: whose optimizer counts.
        embedding_dim: of the tables with tiers.
        lookups: ids that a rank looks up in them in a step; very few or many are cut.
        world_size: ranks.
        ranks_per_node: of them that count as a node.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        SetupError: the machine does not allow it.
    """
    count = int(min(max(lookups, _LEAST_LOOKUPS), _MOST_LOOKUPS))
    by_rank = launch(
        _measure,
        world_size,
        training,
        embedding_dim,
        count,
        device_type,
        backend=backend_for(device_type),
        local_world_size=ranks_per_node,
    )
    fullest = [max(points, key=lambda point: point.bytes) for points in zip(*by_rank, strict=True)]
    return fit_memory(fullest)


def fit_memory(points: Sequence[MemoryPoint]) -> MemoryCalibration:
    """M and c that suit all but the last of ``points``, and what they make of the last.

    ``bytes = others + M * hot_bytes - c * access_bytes``
    """
    work = np.array([[1.0, point.hot_bytes, -point.access_bytes] for point in points])
    measured = np.array([point.bytes for point in points])
    costs = fit_costs(work[:-1], measured[:-1], least=1.0)
    return MemoryCalibration(
        TierMemory(memory_multiplier=max(1.0, costs[1]), saved_activations=min(2.0, costs[2])),
        points,
        float(work[-1] @ costs / measured[-1] - 1),
    )


def _measure(
    rank: int,
    world_size: int,  # noqa: ARG001
    training: TrainingSpec,
    dim: int,
    lookups: int,
    device_type: str,
) -> list[MemoryPoint]:
    silence_upstream()
    device = device_of_rank(device_type)
    row_bytes = dim * _BYTES_PER_SCALAR
    found = []
    for rows_per_lookup, share in _SIZES:
        num_hot, hot_lookups = int(rows_per_lookup * lookups), int(share * lookups)
        ids = _ids(rank, num_hot, hot_lookups, lookups).to(device)
        model, held = _sharded(training, dim, num_hot, _ROWS_PER_LOOKUP * lookups, device)
        peak = _peak_bytes(model, ids, dim, device)
        found.append(MemoryPoint(num_hot * row_bytes, hot_lookups * row_bytes, held, peak))
    return found


def _ids(rank: int, num_hot: int, hot_lookups: int, lookups: int) -> KeyedJaggedTensor:
    """One sample with ``lookups`` ids, ``hot_lookups`` of them below ``num_hot``."""
    generator = torch.Generator().manual_seed(rank)
    rows = _ROWS_PER_LOOKUP * lookups
    hot = torch.randint(max(1, num_hot), (hot_lookups,), generator=generator)
    cold = torch.randint(num_hot, rows, (lookups - hot_lookups,), generator=generator)
    mixed = torch.cat([hot, cold])[torch.randperm(lookups, generator=generator)]
    return KeyedJaggedTensor(["ids"], mixed, lengths=torch.tensor([lookups]))


def _sharded(
    training: TrainingSpec, dim: int, num_hot: int, num_rows: int, device: torch.device
) -> tuple[nn.Module, int]:
    """A row-wise table whose first rows are hot, and what the tier takes between steps."""
    config = EmbeddingConfig(
        name="table", num_embeddings=num_rows, embedding_dim=dim, feature_names=["ids"]
    )
    collection = TieredEmbeddingCollection(
        EmbeddingCollection(tables=[config], device=device),
        {"table": RowTiers(hot=np.arange(num_hot))},
    )
    sharder = TieredEmbeddingCollectionSharder(fused_params(training))
    plan = construct_module_sharding_plan(
        collection,
        {"table": row_wise(compute_kernel="fused")},
        sharder,
        local_size=dist.get_world_size(),
        device_type=device.type,
    )
    model = DistributedModelParallel(
        nn.ModuleDict({"tables": collection}),
        ShardingEnv.from_process_group(dist.group.WORLD),
        device,
        ShardingPlan({"tables": plan}),
        [sharder],
    )
    return model, collection.overlay_bytes(dist.get_world_size(), training.optimizer)


def _peak_bytes(model: nn.Module, ids: KeyedJaggedTensor, dim: int, device: torch.device) -> float:
    profile = StepProfile(device, _WARMUP)
    tables: Any = model.module
    # What the rest of a model would hand back; it takes the same at all sizes.
    gradient = torch.ones(ids.values().numel(), dim, device=device)
    for _ in range(_WARMUP + _MEASURED):
        with profile.step():
            tables["tables"](ids)["ids"].values().backward(gradient)
    return profile.memory().peak
