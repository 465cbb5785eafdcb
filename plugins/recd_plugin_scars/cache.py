"""Plugin ``scars.cache``, a cache of frequently read rows, and the strategy of cached tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from recd_plugin_scars.options import CacheOptions
from recd_plugins.api import (
    Cache,
    PlanContext,
    RowMemory,
    Section,
    SetupError,
    StepShape,
    Table,
    TableStrategy,
    TrainedRun,
    text_utils,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption
    from torchrec.distributed.types import ParameterSharding

    from recd_plugin_scars.planning import CachePlan, TableLoad
    from recd_plugin_scars.runtime.kernel import CachedKernels
    from recd_plugin_scars.runtime.policies import TableCache
    from recd_plugins.api import stage_costs

# Share of the free memory for caches without a given size.
_SHARE_OF_MEMORY = 0.5
_KERNEL = "fused_uvm_caching"
# Bytes per table row and per slot of the maps between rows and slots and other metadata.
_ROW_MAP, _SLOT = 4, 16


class ScarsCache(Cache):
    """Caches frequent rows in GPU memory or a host buffer. Host memory or files have all rows.

    On CUDA, FBGEMM's UVM cache is used for rows in host memory, except for policy ``static``.
    """

    name = "scars.cache"

    class Options(CacheOptions):
        """Size, eviction policy and backing store of the caches."""

    options: CacheOptions

    def check(self, device: torch.device) -> None:
        """Accept every device."""

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> CacheStrategy | None:
        """Return the caches of ``tables``, sized by the access profile; None without tables."""
        from recd_plugin_scars.runtime.policies import UVM_POLICIES, TableCache

        if not tables:
            return None
        plan = plan_caches(self.options, tables, context)
        on_cuda = context.device_type == "cuda" and self.options.folder is None
        policy = self.options.policy or ("lru" if on_cuda else "static")
        caches = {
            name: TableCache(
                policy=policy,
                load_factor=table.load_factor,
                # Use all known hot rows, because TorchRec's planner may enlarge the cache.
                hot_rows=table.load.hot_rows(max(table.cached, len(table.load.access.rows))),
                folder=self.options.folder,
                lookahead=self.options.lookahead,
                uvm=on_cuda and policy in UVM_POLICIES,
            )
            for name, table in plan.tables.items()
        }
        return CacheStrategy(caches, plan)


class CacheStrategy(TableStrategy):
    """Table strategy of tables with a cache of frequent rows.

    Args:
        caches: cache of each table, keyed by table name.
        plan: expected traffic of the caches, for reports and TorchRec's planner; None if unknown.
    """

    def __init__(self, caches: Mapping[str, TableCache], plan: CachePlan | None = None) -> None:
        self.caches = caches
        self.expected = {} if plan is None else plan.tables
        self._plan = plan

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return a dict from table to constraints: kernel ``fused_uvm_caching``, load factor.

        ``prefetch_pipeline=True`` makes TorchRec group tables by width, because all tables of a
        cached kernel must have the same width. Tables with FBGEMM's cache get another
        ``algorithm``, so that TorchRec does not group them with other cached tables.
        """
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import CacheAlgorithm, CacheParams

        chosen = {}
        for table in tables:
            if (cache := self.caches.get(table.name)) is not None:
                params = CacheParams(
                    algorithm=CacheAlgorithm[cache.policy_name.upper()] if cache.uvm else None,
                    load_factor=_between(cache.load_factor, table),
                    prefetch_pipeline=cache.prefetches or not cache.uvm,
                    stats=None if self._plan is None else self._plan.statistics(table.name),
                )
                chosen[table.name] = ParameterConstraints(
                    compute_kernels=[_KERNEL], cache_params=params
                )
        return chosen

    @classmethod
    def kernels(cls, parts: Sequence[Self]) -> CachedKernels:
        from recd_plugin_scars.runtime.kernel import CachedKernels

        return CachedKernels(all_caches(parts))

    def row_memory(
        self, option: ShardingOption, shard: Shard, optimizer: str, device_type: str
    ) -> RowMemory | None:
        """Return a shard's cache memory, and host memory for all rows; None for uncached tables.

        The cache contains the cached rows, the rows of two batches in flight, and a map from row to
        slot. Rows in a file use no host memory.
        """
        if option.compute_kernel != _KERNEL or option.name not in self.caches:
            return None
        cache = self.caches[option.name]
        rows, dim = shard.size
        state = 4 * (optimizer == "rowwise_adagrad")
        row = dim * option.tensor.element_size() + state
        load_factor = option.cache_load_factor or 0.0
        slots = round(load_factor * rows)
        stats = None if option.cache_params is None else option.cache_params.stats
        if stats is not None and not cache.uvm:  # FBGEMM's cache does not grow
            cold = stats.expected_lookups * stats.expected_miss_rate(load_factor)
            slots = min(rows, slots + round(2 * cold * (rows / option.tensor.shape[0])))
        fast = slots * (row + _SLOT) + rows * _ROW_MAP
        if cache.folder is not None:
            return RowMemory(fast, 0, 0)
        if device_type == "cpu":
            return RowMemory(fast, rows * row, rows * state)
        return RowMemory(fast, rows * row, 0)

    def fetch_bandwidth(self, table: str) -> float | None:
        from recd_plugins.api import topologies

        cache = self.caches.get(table)
        return None if cache is None or cache.folder is None else topologies.FILE_BYTES_PER_SECOND

    def work(
        self,
        table: Table,
        sharding: ParameterSharding,
        step: StepShape,  # noqa: ARG002
    ) -> Iterable[tuple[slice, stage_costs.StepCost]]:
        """Yield each shard's rank, as a slice, and bytes per step to and from the backing store."""
        from recd_plugins.api import stage_costs, step_costs

        if table.name not in self.caches or table.name not in self.expected:
            return
        num_bytes = self.expected[table.name].traffic.bytes
        in_memory = self.caches[table.name].folder is None
        for owner, share_of_rows, columns in step_costs.shards_of(table, sharding):
            moved = num_bytes * share_of_rows * columns / table.embedding_dim
            from_host, from_file = (moved, 0.0) if in_memory else (0.0, moved)
            work = stage_costs.StepCost(bytes_from_host=from_host, bytes_from_file=from_file)
            yield slice(owner, owner + 1), work

    @classmethod
    def observe(cls, parts: Sequence[Self], model: nn.Module, steps: int) -> Any:  # noqa: ARG003
        from recd_plugin_scars.report import counted_by_step

        return counted_by_step(model, steps)

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:
        from recd_plugin_scars.report import report_caches

        expected = {name: table for part in parts for name, table in part.expected.items()}
        return [report_caches(all_caches(parts), expected, run)]


def all_caches(parts: Iterable[CacheStrategy]) -> dict[str, TableCache]:
    """Return a dict from table name to cache, over all strategies ``parts``."""
    return {name: cache for part in parts for name, cache in part.caches.items()}


def _between(load_factor: float, table: Table) -> float:
    """Clip the load factor to the open interval (0, 1), as TorchRec's planner requires."""
    part = 0.25 / table.num_embeddings
    return min(max(load_factor, part), 1 - part)


def plan_caches(options: CacheOptions, tables: Sequence[Table], context: PlanContext) -> CachePlan:
    """Choose how many rows of each table to cache, and predict cache misses and traffic.

    Raises:
        SetupError: a cache would have more rows than its table, or all caches together need more
            memory than the ranks have.
    """
    from recd_plugin_scars.planning import CachePlan, TableLoad

    profile = options.accesses(tables, context)
    loads = {
        table.name: TableLoad(
            profile.covering(table.name, table.num_embeddings), table.embedding_dim
        )
        for table in tables
    }
    step: Any = {
        "batch_size": context.batch_size * context.world_size,
        "optimizer": context.optimizer,
        "held": int(options.lookahead),
    }
    memory = None if context.memory_bytes is None else context.memory_bytes * context.world_size
    if options.rows is not None or options.share is not None:
        plan = CachePlan.of(loads, _sizes(options, tables), **step)
    elif options.bytes is not None:
        plan = CachePlan.within(loads, text_utils.read_bytes(options.bytes), **step)
    else:
        plan = CachePlan.within(loads, _room(options, loads, context, memory), **step)
    if memory is not None and plan.cached_bytes > memory:
        raise SetupError(
            f"scars.cache: the caches of {text_utils.shortened(list(plan.tables))} need "
            f"{_gib(plan.cached_bytes)}, but the {context.world_size} ranks have only "
            f"{_gib(memory)} of {context.device_type} memory. Reduce option 'rows', 'share' or "
            "'bytes', or remove the option."
        )
    return plan


def _room(
    options: CacheOptions, loads: Mapping[str, TableLoad], context: PlanContext, memory: int | None
) -> float | None:
    """Return the default total bytes of the caches: half of the free memory, None if unknown."""
    from recd_plugin_scars.planning import row_bytes

    if memory is None:
        return None
    room = float(memory)
    if context.device_type == "cpu" and options.folder is None:
        room -= sum(
            load.num_embeddings * row_bytes(load.embedding_dim, context.optimizer)
            for load in loads.values()
        )
    return max(0.0, _SHARE_OF_MEMORY * room)


def _sizes(options: CacheOptions, tables: Sequence[Table]) -> dict[str, int]:
    if options.share is not None:
        return {table.name: round(options.share * table.num_embeddings) for table in tables}
    assert options.rows is not None
    for table in tables:
        if options.rows > table.num_embeddings:
            raise SetupError(
                f"table {table.name!r}: option 'rows' of 'scars.cache' is {options.rows:,}, but "
                f"the table has only {table.num_embeddings:,} rows. Reduce 'rows', or use option "
                "'share'."
            )
    return {table.name: options.rows for table in tables}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
