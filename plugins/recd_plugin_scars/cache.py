"""``scars.cache``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recd_plugin_scars.options import CacheOptions
from recd_plugins.api import Cache, Setting, SetupError, Table

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints

    from recd_plugin_scars.part import CachePart
    from recd_plugin_scars.planning import CachePlan


class ScarsCache(Cache):
    """Hot rows in fast memory, in front of tables in host memory or in files (SCARS)."""

    name = "scars.cache"

    class Options(CacheOptions):
        """How much is cached, by which policy, and where all rows are."""

    options: CacheOptions
    _planned: tuple[tuple[tuple[Table, ...], Setting], CachePlan] | None = None

    def check(self, device: torch.device) -> None:
        """Refuse UVM caching without CUDA.

        Raises:
            SetupError: says what to do.
        """
        if self.options.policy == "uvm" and device.type != "cuda":
            raise SetupError(
                f"{self.name} with policy uvm needs CUDA, as it caches host memory in GPU memory, "
                f"and this run is on {device.type}: take policy static, lfu or lru, which run "
                "there too"
            )

    def part(self, tables: Sequence[Table], setting: Setting) -> CachePart | None:
        """The planned caches; None with the policy uvm, whose kernel is TorchRec's.

        Raises:
            SetupError: the caches are larger than a table or than the ranks' memory, or ``uvm``
                is to run without CUDA.
            DataError: the data cannot be read, or the access profile is not of these tables.
        """
        from recd_plugin_scars.part import CachePart
        from recd_plugin_scars.runtime.spec import TableCache

        plan = self._plan(tables, setting)
        if plan is None or self.options.policy == "uvm":
            return None
        caches = {
            name: TableCache(
                policy=self.options.policy,
                load_factor=table.load_factor,
                # All that are known, as TorchRec's planner may cache more.
                hot_rows=table.load.hot_rows(max(table.cached, len(table.load.access.rows))),
                folder=self.options.folder,
                lookahead=self.options.lookahead,
            )
            for name, table in plan.tables.items()
        }
        return CachePart(caches, plan)

    def _plan(self, tables: Sequence[Table], setting: Setting) -> CachePlan | None:
        """Sizes and expected traffic of the caches, made once for a setting; see ``part``."""
        if not tables:
            return None
        if self.options.policy == "uvm" and setting.device_type != "cuda":
            import torch

            self.check(torch.device(setting.device_type))
        key = (tuple(tables), setting)
        if self._planned is None or self._planned[0] != key:
            from recd_plugin_scars.sizes import plan_caches

            self._planned = key, plan_caches(self.options, tables, setting)
        return self._planned[1]

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """With the policy uvm: FBGEMM's caching kernel and the planned load factors."""
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
