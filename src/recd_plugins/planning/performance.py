"""What TorchRec's planner takes for the time of a plan, put right where it is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from functools import cached_property
from typing import Any

import numpy as np
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
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    SharderDataMap,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from recd_plugins.interfaces import TablePart
from recd_plugins.planning.collectives import Kind, collectives_of
from recd_plugins.planning.quick_option import Placement, quick
from recd_plugins.planning.work import LEARNED, SCALAR_BYTES
from recd_plugins.registry.checked_part import one_answer
from recd_plugins.values.stage_costs import StageCosts

# Milliseconds of a step for each collective of a module, however little it sends. On CPU inferred
# from steps over gloo with 100 features, on a machine with other load; on GPUs an assumption.
_COLLECTIVE_MS = {"cpu": 1.0, "cuda": 0.05}


class _SplitByRows(EmbeddingPerfEstimatorConfig):
    """TorchRec's estimates, but that each of the ranks which share a table gets its part of ids.

    TorchRec (1.6 to 1.9) has each of them receive all.
    """

    def __dir__(self) -> list[str]:
        # TorchRec looks through all for marks, for each term of each estimate.
        return self._marked

    @cached_property
    def _marked(self) -> list[str]:
        """The names of methods that TorchRec's ``annotations`` mark."""
        methods = inspect.getmembers(type(self), inspect.isfunction)
        return [name for name, method in methods if any(m.startswith("_is_") for m in vars(method))]

    @input_dist_comms(sharding_type=ShardingType.ROW_WISE.value)
    def row_wise_input_dist(self, ctx: ShardPerfContext) -> float:
        """Milliseconds in which a rank receives its ids."""
        return _milliseconds_of_ids(ctx, ctx.world_size)

    @input_dist_comms(
        sharding_type=[ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value]
    )
    def table_row_wise_input_dist(self, ctx: ShardPerfContext) -> float:
        """Likewise, where the ranks of a node share a table."""
        return _milliseconds_of_ids(ctx, ctx.local_world_size)


@use_min_dim_for_lookup(False)
@use_block_usage_penalty(False)
class _OnCpu(_SplitByRows):
    """Without what narrow rows cost a warp, for which TorchRec charges whole tables on CPU too.

    Tables that are cached there are read as others are, which TorchRec has no bandwidth for; what
    is not in the fast memory is fetched from memory.

    Args:
        topology: the ranks.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.hbm_to_ddr_mem_bw = topology.ddr_mem_bw

    def get_device_bw(
        self, compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any
    ) -> float | None:
        """See TorchRec's ``HardwarePerfConfig.get_device_bw``."""
        if compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
            compute_kernel = EmbeddingComputeKernel.FUSED.value
        return super().get_device_bw(compute_device, compute_kernel, *args, **kwargs)


class PerfEstimator(EmbeddingPerfEstimatorV2):
    """TorchRec's estimates of shards, in milliseconds, for the device at hand.

    Args:
        topology: the ranks and their bandwidths.
        constraints: rows and ids of each table's features.
        parts: of entries, which know where missing rows are fetched from.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints],
        parts: Sequence[TablePart] = (),
    ) -> None:
        on_cpu = topology.compute_device == "cpu"
        config = _OnCpu(topology) if on_cpu else _SplitByRows()
        super().__init__(topology=topology, constraints=constraints, config=config)
        self._from_host = topology.ddr_mem_bw if on_cpu else topology.hbm_to_ddr_mem_bw
        self._parts = parts

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """See TorchRec's ``ShardEstimator.estimate``."""
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            for shard in option.shards:
                shard.perf.prefetch_compute *= self._times_slower(option.name)

    def _times_slower(self, table: str) -> float:
        """Than from host memory, missing rows are fetched."""
        bandwidth = one_answer(
            self._parts, table, "fetch_bandwidth", lambda part: part.fetch_bandwidth(table)
        )
        return 1.0 if bandwidth is None else 1000 * self._from_host / bandwidth


class StepTime(NoopPerfModel):
    """Milliseconds of the rank that has most to do, and what collectives cost every rank.

    TorchRec's takes sharding types for free, so that it shards half of the tables of a module in
    another way where that evens out the last percent between ranks.

    Args:
        topology: the ranks.
        variable: names of tables, as ``variable_bags``.
        costs: that were measured; None where none were.
    """

    def __init__(
        self,
        topology: Topology,
        variable: Set[str] = frozenset(),
        costs: StageCosts | None = None,
    ) -> None:
        super().__init__(topology)
        self._num_ranks = topology.world_size
        self._num_local = topology.local_world_size
        self._gloo = topology.compute_device == "cpu"
        self._variable = variable
        costs = costs or StageCosts()
        self._each_collective = costs.all_to_all.collectives * 1000 or _COLLECTIVE_MS.get(
            topology.compute_device, 0.0
        )
        # All of a copied table learns, and its gradients are summed: TorchRec has but the links'
        # time of the sum, beside which this counts.
        sent = 2 * (self._num_ranks - 1) / self._num_ranks
        self._each_copied_byte = 1000 * (
            LEARNED * costs.other.element_bytes + sent * costs.all_reduce.bytes_reduced
        )

    def rate(self, plan: list[ShardingOption]) -> float:
        """See TorchRec's ``PerfModel.rate``."""
        assert isinstance(plan, Placement), "the partitioner makes these"
        busy = np.zeros(self._num_ranks)
        for option, ranks in zip(quick(plan), plan.ranks, strict=True):
            np.add.at(busy, ranks, option.loads.milliseconds)
        kinds = {
            Kind(each.path, each.sharding_type, each.is_pooled, each.name in self._variable)
            for each in plan
        }
        collectives = collectives_of(
            kinds,
            world_size=self._num_ranks,
            local_world_size=self._num_local,
            gloo=self._gloo,
            # As trainers of several nodes have it that do not say training.overlap: false.
            joined=self._gloo and self._num_local < self._num_ranks,
        )
        copied = sum(
            each.tensor.numel() * SCALAR_BYTES
            for each in plan
            if each.sharding_type == ShardingType.DATA_PARALLEL.value
        )
        return (
            float(busy.max())
            + self._each_collective * collectives
            + self._each_copied_byte * copied
        )


def collective_seconds(device_type: str) -> float:
    """What a collective is taken to take where nobody has measured it."""
    return _COLLECTIVE_MS.get(device_type, 0.0) / 1000


def _milliseconds_of_ids(ctx: ShardPerfContext, sharing_ranks: int) -> float:
    assert ctx.comms_bandwidths is not None, "a topology has them"
    bandwidth: float = ctx.comms_bandwidths.get_bw(
        world_size=ctx.world_size,
        local_world_size=ctx.local_world_size,
        collective_type=CollectiveType.ALL_TO_ALL,
    )
    ids = ctx.batch_inputs * ctx.world_size / sharing_ranks
    return ids * ctx.input_data_type_size / bandwidth
