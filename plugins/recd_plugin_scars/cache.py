"""Plugin ``scars.cache``: a cache of frequently read rows of embedding tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recd_plugin_scars.options import CacheOptions
from recd_plugins.api import Cache, PlanContext, SetupError, Table, text_utils

if TYPE_CHECKING:
    import torch

    from recd_plugin_scars.planning import CachePlan, TableLoad
    from recd_plugin_scars.strategy import CacheStrategy

# Share of the free memory for caches without a given size.
_SHARE_OF_MEMORY = 0.5


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
        from recd_plugin_scars.strategy import CacheStrategy

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
