"""``scars.cache``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recd_plugin_scars.options import CacheOptions
from recd_plugins.api import Cache, PlanContext, SetupError, Table, text_utils

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints

    from recd_plugin_scars.planning import CachePlan, TableLoad
    from recd_plugin_scars.strategy import CacheStrategy

# Share of the free memory for caches without a given size.
_SHARE_OF_MEMORY = 0.5


class ScarsCache(Cache):
    """Caches hot rows in fast memory; all rows are in host memory or in files (SCARS)."""

    name = "scars.cache"

    class Options(CacheOptions):
        """Size, policy and backing store of the caches."""

    options: CacheOptions
    _planned: tuple[tuple[tuple[Table, ...], PlanContext], CachePlan] | None = None

    def check(self, device: torch.device) -> None:
        """Refuse UVM caching without CUDA."""
        if self.options.policy == "uvm" and device.type != "cuda":
            raise SetupError(
                f"{self.name} with policy uvm needs CUDA, as it caches host memory in GPU memory, "
                f"and this run is on {device.type}: take policy static, lfu or lru, which run "
                "there too"
            )

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> CacheStrategy | None:
        """Return the planned caches, or None with the policy uvm, which uses TorchRec's kernel."""
        from recd_plugin_scars.runtime.policies import TableCache
        from recd_plugin_scars.strategy import CacheStrategy

        plan = self._plan(tables, context)
        if plan is None or self.options.policy == "uvm":
            return None
        caches = {
            name: TableCache(
                policy=self.options.policy,
                load_factor=table.load_factor,
                # Use all known hot rows, because TorchRec's planner may enlarge the cache.
                hot_rows=table.load.hot_rows(max(table.cached, len(table.load.access.rows))),
                folder=self.options.folder,
                lookahead=self.options.lookahead,
            )
            for name, table in plan.tables.items()
        }
        return CacheStrategy(caches, plan)

    def _plan(self, tables: Sequence[Table], context: PlanContext) -> CachePlan | None:
        if not tables:
            return None
        if self.options.policy == "uvm" and context.device_type != "cuda":
            import torch

            self.check(torch.device(context.device_type))
        key = (tuple(tables), context)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, plan_caches(self.options, tables, context)
        return self._planned[1]

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Return FBGEMM's caching kernel and the planned load factors with the policy uvm."""
        if self.options.policy != "uvm" or self._planned is None:
            return {}
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import CacheParams

        plan, found = self._planned[1], {}
        for table in tables:
            planned = plan.tables[table.name]
            # FBGEMM caches at least one row and not all.
            cached = max(1, min(planned.cached, table.num_embeddings - 1))
            found[table.name] = ParameterConstraints(
                compute_kernels=["fused_uvm_caching"],
                cache_params=CacheParams(
                    load_factor=cached / table.num_embeddings,
                    prefetch_pipeline=self.options.lookahead,
                    stats=plan.statistics(table.name),
                ),
            )
        return found


def plan_caches(options: CacheOptions, tables: Sequence[Table], context: PlanContext) -> CachePlan:
    """Size the caches of ``tables`` together, and predict their traffic.

    Raises:
        SetupError: the caches are larger than a table, or than the memory of the ranks.
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
        # FBGEMM's own cache also keeps the last used rows.
        "policy": "lru" if options.policy == "uvm" else options.policy,
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
            f"the caches of {text_utils.shortened(list(plan.tables))} take "
            f"{_gib(plan.cached_bytes)}, and the "
            f"{context.device_type} memory of all {context.world_size} ranks is {_gib(memory)}: "
            "lower rows, share or bytes, or leave them out, which caches what pays"
        )
    return plan


def _room(
    options: CacheOptions, loads: Mapping[str, TableLoad], context: PlanContext, memory: int | None
) -> float | None:
    """Return the bytes for caches without a given size: half of the free memory, if known."""
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
                f"the option rows is {options.rows:,}, and table {table.name} has "
                f"{table.num_embeddings:,} rows: lower it, narrow the patterns of the entry, or "
                "take the option share"
            )
    return {table.name: options.rows for table in tables}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
