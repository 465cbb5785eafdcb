"""Estimates memory and time of shards and plans, based on TorchRec's estimators."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.estimator import (
    EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorV2,
    ShardPerfContext,
)
from torchrec.distributed.planner.estimator.annotations import (
    input_dist_comms,
    use_block_usage_penalty,
    use_min_dim_for_lookup,
)
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingStorageEstimator,
    _get_optimizer_multipler,  # private in torchrec 1.6 to 1.9: there is no public equivalent
)
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    Shard,
    SharderDataMap,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces import RowMemory, Table, TableStrategy
from recd_plugins.interfaces.data_profile import DataProfile
from recd_plugins.interfaces.step_cost import StageCosts
from recd_plugins.planning.search import Placement
from recd_plugins.planning.step_cost import (
    LEARNED,
    SCALAR_BYTES,
    Kind,
    collective_seconds,
    count_collectives,
)

#: Share of memory reserved for the allocator and the interpreter.
RESERVED_SHARE = 0.15
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


def dense_bytes(
    module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]], training: TrainingSpec
) -> int:
    """Return a rank's bytes of dense parameters, gradients, DDP buckets and optimizer state."""
    copies = 3 + {"sgd": 0, "adagrad": 1}.get(training.dense_update, 2)
    module_types = {sharder.module_type for sharder in sharders}
    tables = {
        id(parameter)
        for child in module.modules()
        if type(child) in module_types
        for parameter in child.parameters()
    }
    return copies * sum(
        parameter.numel() * parameter.element_size()
        for parameter in module.parameters()
        if id(parameter) not in tables
    )


def state_bytes(option: ShardingOption, shard: Shard, training: TrainingSpec) -> int:
    """Return the bytes of a shard's optimizer state; for a data-parallel table plus gradients."""
    state = 4 * shard.size[0] if training.optimizer == "rowwise_adagrad" else 0
    if (own := _own_optimizer(option)) is not None:
        num_bytes = math.prod(shard.size) * option.tensor.element_size()
        state = math.ceil(num_bytes * _get_optimizer_multipler(own, option.tensor.shape))
    if option.sharding_type == _DATA_PARALLEL:
        state += 2 * option.tensor.numel() * option.tensor.element_size()
    return state


def _own_optimizer(option: ShardingOption) -> type[torch.optim.Optimizer] | None:
    """Return the optimizer class set by ``apply_optimizer_in_backward``, or None."""
    classes: list[type[torch.optim.Optimizer]] = getattr(option.tensor, "_optimizer_classes", [])
    return classes[0] if classes else None


def memory_of_parts(
    parts: Iterable[TableStrategy], ranks_per_node: int, optimizer: str
) -> dict[str, int]:
    """Return a dict from memory component to the bytes per rank that table strategies allocate."""
    found = Counter[str]()
    for part in parts:
        found.update(part.memory_of_rank(ranks_per_node, optimizer))
    return dict(found)


def activations_of_parts(
    parts: Iterable[TableStrategy], tables: Iterable[Table], profile: DataProfile, batch_size: int
) -> int:
    """Return the total activation bytes of plugins' table strategies."""
    ids = [(table, profile.ids(table, batch_size)) for table in tables]
    return round(sum(part.activation_bytes(*each) for part in parts for each in ids))


def row_memory(
    parts: Iterable[TableStrategy],
    option: ShardingOption,
    shard: Shard,
    optimizer: str,
    device_type: str,
) -> RowMemory | None:
    """Return the memory of a shard's rows; None if TorchRec's kernels store the rows."""
    known = (part.row_memory(option, shard, optimizer, device_type) for part in parts)
    return next((memory for memory in known if memory is not None), None)


def free_storage(
    topology: Topology,
    training: TrainingSpec,
    parts: Sequence[TableStrategy],
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    activation_bytes: int,
) -> NDArray[np.int64]:
    """Return the free bytes for tables, int64 ``[number of Storage fields, world_size]``."""
    beside = memory_of_parts(parts, topology.local_world_size, training.optimizer)
    taken = dense_bytes(module, sharders, training) + sum(beside.values()) + activation_bytes
    on_cpu = topology.compute_device == "cpu"
    free = np.array([list(vars(device.storage).values()) for device in topology.devices]).T
    hbm, ddr = free[0], free[1]
    free[0] = hbm * (1 - RESERVED_SHARE) - (0 if on_cpu else taken)
    if on_cpu:
        free[1] = ddr * (1 - RESERVED_SHARE) - taken
    return free


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's storage estimator, plus optimizer state and memory of plugins' strategies."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        training: TrainingSpec,
        parts: Sequence[TableStrategy] = (),
    ) -> None:
        super().__init__(topology=topology, constraints=constraints)
        self._training = training
        self._parts = parts
        self._device_type = topology.compute_device
        self.sharder_data_map: SharderDataMap = {}

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        self.sharder_data_map = sharder_data_map
        kernels = {
            id(option): option.compute_kernel
            for option in sharding_options
            if self._rows(option, option.shards[0]) is not None
        }
        for option in sharding_options:
            if id(option) in kernels:
                option.compute_kernel = EmbeddingComputeKernel.FUSED.value
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            on_gpu = self._device_type != "cpu"
            if id(option) in kernels:
                option.compute_kernel = kernels[id(option)]
            elif _own_optimizer(option) is not None:
                continue
            else:
                on_gpu = on_gpu and "uvm" not in option.compute_kernel
            for shard in option.shards:
                here, on_host = state_bytes(option, shard, self._training), 0
                if (rows := self._rows(option, shard)) is not None:
                    here = rows.there - math.prod(shard.size) * option.tensor.element_size()
                    on_host = rows.on_host
                shard.storage += Storage(
                    hbm=here if on_gpu else 0, ddr=on_host + (0 if on_gpu else here)
                )

    def _rows(self, option: ShardingOption, shard: Shard) -> RowMemory | None:
        return row_memory(self._parts, option, shard, self._training.optimizer, self._device_type)


class _SplitByRows(EmbeddingPerfEstimatorConfig):
    """TorchRec's performance model, except that a rank receives only the ids of its shards.

    TorchRec (1.6 to 1.9) counts all ids for each rank.
    """

    def __dir__(self) -> list[str]:
        return self._marked  # TorchRec iterates over all names for each term of each estimate

    @cached_property
    def _marked(self) -> list[str]:
        """Return the names of methods that TorchRec's annotation decorators marked."""
        methods = inspect.getmembers(type(self), inspect.isfunction)
        return [name for name, method in methods if any(m.startswith("_is_") for m in vars(method))]

    @input_dist_comms(sharding_type=ShardingType.ROW_WISE.value)
    def row_wise_input_dist(self, ctx: ShardPerfContext) -> float:
        """Return the milliseconds to receive the ids of a row-wise table."""
        return _milliseconds_of_ids(ctx, ctx.world_size)

    @input_dist_comms(
        sharding_type=[ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value]
    )
    def table_row_wise_input_dist(self, ctx: ShardPerfContext) -> float:
        """Return the milliseconds to receive the ids of a table that is split within a node."""
        return _milliseconds_of_ids(ctx, ctx.local_world_size)


@use_min_dim_for_lookup(False)
@use_block_usage_penalty(False)
class _OnCpu(_SplitByRows):
    """TorchRec's performance model without the GPU penalty for narrow rows.

    TorchRec has no bandwidth for cached tables on CPU, so this class uses the bandwidth of uncached
    tables.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.hbm_to_ddr_mem_bw = topology.ddr_mem_bw

    def get_device_bw(
        self, compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any
    ) -> float | None:
        if compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
            compute_kernel = EmbeddingComputeKernel.FUSED.value
        return super().get_device_bw(compute_device, compute_kernel, *args, **kwargs)


class PerfEstimator(EmbeddingPerfEstimatorV2):
    """TorchRec's time estimator, with the bandwidth at which plugins' kernels fetch rows."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        parts: Sequence[TableStrategy] = (),
    ) -> None:
        on_cpu = topology.compute_device == "cpu"
        config = _OnCpu(topology) if on_cpu else _SplitByRows()
        super().__init__(topology=topology, constraints=constraints, config=config)
        self._from_host = topology.ddr_mem_bw if on_cpu else topology.hbm_to_ddr_mem_bw
        self._parts = parts

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            known = (part.fetch_bandwidth(option.name) for part in self._parts)
            bandwidth = next((each for each in known if each is not None), None)
            for shard in option.shards if bandwidth is not None else ():
                shard.perf.prefetch_compute *= 1000 * self._from_host / bandwidth


def _milliseconds_of_ids(ctx: ShardPerfContext, sharing_ranks: int) -> float:
    assert ctx.comms_bandwidths is not None, "a topology has them"
    bandwidth: float = ctx.comms_bandwidths.get_bw(
        world_size=ctx.world_size,
        local_world_size=ctx.local_world_size,
        collective_type=CollectiveType.ALL_TO_ALL,
    )
    ids = ctx.batch_inputs * ctx.world_size / sharing_ranks
    return ids * ctx.input_data_type_size / bandwidth


def step_rating(
    topology: Topology, variable: Collection[str] = (), costs: StageCosts | None = None
) -> Callable[[Placement], float]:
    """Return a function that estimates the milliseconds of a step for a placement of shards.

    The function adds the time of the busiest rank and the time of collectives. TorchRec's own
    rating ignores collectives, and therefore mixes sharding types within a module. ``variable`` are
    pooled tables whose features may have fewer rows than a batch.
    """
    costs = costs or StageCosts()
    ranks, on_cpu = topology.world_size, topology.compute_device == "cpu"
    each = 1000 * (costs.all_to_all.collectives or collective_seconds(topology.compute_device))
    # Replicated tables are updated and all-reduced completely.
    sent = 2 * (ranks - 1) / ranks
    each_copied_byte = 1000 * (
        LEARNED * costs.other.element_bytes + sent * costs.all_reduce.bytes_reduced
    )
    # Several nodes: ids of all modules are sent together, unless training.overlap is false.
    joined = on_cpu and topology.local_world_size < ranks

    def rate(placement: Placement) -> float:
        busy = np.zeros(ranks)
        for option, placed in placement.items():
            np.add.at(busy, placed, option.milliseconds)
        shardings = [option.sharding for option in placement]
        kinds = {
            Kind(each.path, each.sharding_type, each.is_pooled, each.name in variable)
            for each in shardings
        }
        copies = [each for each in shardings if each.sharding_type == _DATA_PARALLEL]
        copied = sum(each.tensor.numel() * SCALAR_BYTES for each in copies)
        local = topology.local_world_size
        collectives = count_collectives(
            kinds, world_size=ranks, local_world_size=local, gloo=on_cpu, joined=joined
        )
        return float(busy.max()) + each * collectives + each_copied_byte * copied

    return rate
