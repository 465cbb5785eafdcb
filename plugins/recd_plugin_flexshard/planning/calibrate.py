"""Measures the memory of replicated rows: M and c of FlexShard's cost model.

Training steps of a tiered EmbeddingCollection are profiled at a few sizes of its hot tier. M (a
copy, its optimizer state, lookup and gradient buffers) and c are fitted to the memory at the
fullest moment of a step; one more size shows how well they predict it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table as TextTable
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.plan_report import COLLECTIVE_NAMES
from recd_plugin_flexshard.planning import TierPlan
from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)
from recd_plugin_flexshard.table_plan import SECTION, TierMemory
from recd_plugins.api import (
    CollectiveRates,
    RunConfig,
    SetupError,
    StepProfile,
    TopologySpec,
    TrainingSpec,
    backend_for,
    device_of_rank,
    fit_costs,
    fused_params,
    launch,
    measure_collectives,
    refuse_existing,
    silence_upstream,
    write_topology,
)

_BYTES_PER_SCALAR = 4
# Accesses of a rank and step: enough for small buffers not to count, few enough to take no time.
_LEAST_LOOKUPS, _MOST_LOOKUPS = 2**12, 2**14
# Hot rows over accesses of a step, and their share of the accesses. All but the last are fitted.
_SIZES = ((0.0, 0.0), (0.125, 0.3), (0.125, 0.7), (0.5, 0.3), (0.5, 0.7), (0.25, 0.5))
_ROWS_PER_LOOKUP = 4
# Where gloo lets go of a tensor late, one step shows more than others.
_WARMUP, _MEASURED = 2, 10


@dataclass(frozen=True)
class MemoryPoint:
    """Memory of a rank at one size of the hot tier."""

    hot_bytes: float
    access_bytes: float
    held_bytes: float
    peak_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes at the fullest moment."""
        return self.held_bytes + self.peak_bytes


def calibrate_tiers(
    registry: RunConfig, plans: Iterable[TierPlan], spec: TopologySpec, path: Path
) -> tuple[TopologySpec, TextTable]:
    """Measure as many ranks as ``spec`` has, write the topology, and return it with a table."""
    refuse_existing(path)
    if spec.device == "cuda" and torch.cuda.device_count() < spec.world_size:
        raise SetupError(
            f"measuring {spec.world_size} ranks needs as many CUDA devices on this machine, and "
            f"there are {torch.cuda.device_count()}; leave --topology out to measure what is here"
        )
    demands = [demand for plan in plans for demand in plan.demands]
    lookups = sum(demand.length / demand.dedupe_factor for demand in demands)
    rates = measure_collectives(spec.world_size, spec.ranks_per_node, spec.device)
    by_rank = launch(
        _measure,
        spec.world_size,
        registry.training,
        max(demand.embedding_dim for demand in demands),
        int(np.clip(lookups * registry.training.batch_size, _LEAST_LOOKUPS, _MOST_LOOKUPS)),
        spec.device,
        backend=backend_for(spec.device),
        local_world_size=spec.ranks_per_node,
    )
    fullest = [max(points, key=lambda point: point.bytes) for points in zip(*by_rank, strict=True)]
    memory, error = fit_memory(fullest)
    measured = spec.model_copy(update={"collectives": rates}).with_section(SECTION, memory)
    comment = f"Measured by recd plan {registry.path} --tiers --calibrate {path}."
    write_topology(path, measured, comment)
    return measured, _table(rates, memory, error)


def _table(rates: CollectiveRates, memory: TierMemory, error: float) -> TextTable:
    table = TextTable(title="measured", title_justify="left", caption_justify="left")
    table.add_column("")
    table.add_column("latency, ms", justify="right")
    table.add_column("MB/s", justify="right")
    for name, rate in rates:
        speed = f"{rate.bytes_per_second / 1e6:,.0f}"
        table.add_row(COLLECTIVE_NAMES[name], f"{rate.seconds * 1e3:.3f}", speed)
    table.caption = (
        f"M = {memory.memory_multiplier:.2f}, c = {memory.saved_activations:.2f}; at a size that "
        f"they were not fitted to, they are {abs(error):.1%} off"
    )
    return table


def fit_memory(points: Sequence[MemoryPoint]) -> tuple[TierMemory, float]:
    """Fit M and c to all but the last of ``points``, and return their relative error there.

    ``bytes = others + M * hot_bytes - c * access_bytes``
    """
    work = np.array([[1.0, point.hot_bytes, -point.access_bytes] for point in points])
    measured = np.array([point.bytes for point in points])
    costs = fit_costs(work[:-1], measured[:-1], least=1.0)
    memory = TierMemory(memory_multiplier=max(1.0, costs[1]), saved_activations=min(2.0, costs[2]))
    return memory, float(work[-1] @ costs / measured[-1] - 1)


def _measure(
    rank: int,
    world_size: int,
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
        config = EmbeddingConfig(
            name="table",
            num_embeddings=_ROWS_PER_LOOKUP * lookups,
            embedding_dim=dim,
            feature_names=["ids"],
        )
        collection = TieredEmbeddingCollection(
            EmbeddingCollection(tables=[config], device=device),
            {"table": RowTiers(hot=np.arange(num_hot))},
        )
        held = collection.overlay_bytes(world_size, training.optimizer)
        peak = _peak_bytes(_sharded(collection, training, device), ids, dim, device)
        found.append(MemoryPoint(num_hot * row_bytes, hot_lookups * row_bytes, held, peak))
    return found


def _ids(rank: int, num_hot: int, hot_lookups: int, lookups: int) -> KeyedJaggedTensor:
    """Return one sample with ``lookups`` ids, ``hot_lookups`` of them below ``num_hot``."""
    generator = torch.Generator().manual_seed(rank)
    rows = _ROWS_PER_LOOKUP * lookups
    hot = torch.randint(max(1, num_hot), (hot_lookups,), generator=generator)
    cold = torch.randint(num_hot, rows, (lookups - hot_lookups,), generator=generator)
    mixed = torch.cat([hot, cold])[torch.randperm(lookups, generator=generator)]
    return KeyedJaggedTensor(["ids"], mixed, lengths=torch.tensor([lookups]))


def _sharded(
    collection: TieredEmbeddingCollection, training: TrainingSpec, device: torch.device
) -> nn.Module:
    sharder = TieredEmbeddingCollectionSharder(fused_params(training))
    plan = construct_module_sharding_plan(
        collection,
        {"table": row_wise(compute_kernel="fused")},
        sharder,
        local_size=dist.get_world_size(),
        device_type=device.type,
    )
    return DistributedModelParallel(
        nn.ModuleDict({"tables": collection}),
        ShardingEnv.from_process_group(dist.group.WORLD),
        device,
        ShardingPlan({"tables": plan}),
        [sharder],
    )


def _peak_bytes(model: nn.Module, ids: KeyedJaggedTensor, dim: int, device: torch.device) -> float:
    profile = StepProfile(device, _WARMUP)
    tables: Any = model.module
    # The gradient from the rest of a model takes the same at all sizes.
    gradient = torch.ones(ids.values().numel(), dim, device=device)
    for _ in range(_WARMUP + _MEASURED):
        with profile.step():
            tables["tables"](ids)["ids"].values().backward(gradient)
    return profile.memory().peak
