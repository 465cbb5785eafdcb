"""Plugin ``tinylfu.cache``: a cache of table rows with the policy TinyLFU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugins.api import Cache, PlanContext, PluginOptions, Table

if TYPE_CHECKING:
    import torch

    from recd_plugin_tinylfu.strategy import TinyLfuStrategy


class TinyLfuCache(Cache):
    """Keeps frequently read rows in fast memory. Rows that are read only once evict no others."""

    name = "tinylfu.cache"

    class Options(PluginOptions):
        share: float = Field(default=0.1, gt=0, le=1, description="Fraction of rows to cache.")
        sample: int = Field(default=10, gt=0, description="Reads per row before counts are halved.")

    options: Options

    def check(self, device: torch.device) -> None:
        """Accept every device."""

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> TinyLfuStrategy | None:
        """Return caches that start empty, with traffic predicted for the most read rows."""
        from recd_plugin_scars.api import CachePlan, TableCache, TableLoad
        from recd_plugin_tinylfu.policy import TinyLfu
        from recd_plugin_tinylfu.strategy import TinyLfuStrategy

        if not tables:
            return None
        share = self.options.share
        reads = context.data.access(tables, 65_536)
        plan = CachePlan.of(
            {
                table.name: TableLoad(
                    reads.covering(table.name, table.num_embeddings), table.embedding_dim
                )
                for table in tables
            },
            {table.name: round(share * table.num_embeddings) for table in tables},
            batch_size=context.batch_size * context.world_size,
            optimizer=context.optimizer,
            held=1,  # lookahead: the previous batch's rows are still in fast memory
        )
        policy = partial(TinyLfu, sample=self.options.sample)
        caches = {table.name: TableCache(policy=policy, load_factor=share) for table in tables}
        return TinyLfuStrategy(caches, plan)
