"""The plugin ``dynamic.table``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from recd_plugins.api import (
    PlanContext,
    PluginOptions,
    SetupError,
    SharderArguments,
    Sharding,
    Table,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder

    from recd_plugin_dynamic.table import DynamicTable


class DynamicOptions(PluginOptions):
    """Options of ``dynamic.table``."""

    buckets: int = Field(
        default=64,
        ge=1,
        description="Number of buckets that ids are spread over; a multiple of the number of ranks "
        "and a divisor of the table's rows. Ids are evicted per bucket.",
    )
    eviction: str = Field(
        default="lru",
        description="What to evict when a bucket is full: lru, lfu, ttl, none (an error), or "
        "module:Class of a policy.",
    )
    min_count: int = Field(
        default=1, ge=1, description="Number of batches with an id before the id gets a row."
    )
    coalesce: bool = Field(
        default=False, description="Send each distinct id only once per batch and rank."
    )


class DynamicSharding(Sharding):
    """Tables that map raw 64-bit ids to rows, insert new ids and evict old ones."""

    name = "dynamic.table"
    maps_ids = True

    class Options(DynamicOptions):
        """Buckets, eviction and admission of ids."""

    options: DynamicOptions

    @property
    def coalesces(self) -> bool:
        return self.options.coalesce

    def id_limit(self, table: Table) -> int | None:  # noqa: ARG002
        return None

    def rewrite(self, model: nn.Module, tables: Sequence[Table], context: PlanContext) -> nn.Module:  # noqa: ARG002
        from recd_plugin_dynamic.runtime.collection import with_dynamic_tables

        return with_dynamic_tables(model, {each.name: self._layout(each) for each in tables})

    def ids_of_rows(self, table: str, read: Callable[[str], Tensor]) -> Tensor:
        from torch.nn.functional import pad

        # The first row of each bucket is its default row.
        return pad(read(f".indices.{table}.ids"), (1, 0), value=-1).flatten()

    def _layout(self, table: Table) -> DynamicTable:
        from recd_plugin_dynamic.index import policies
        from recd_plugin_dynamic.table import DynamicTable

        buckets, rows = self.options.buckets, table.num_embeddings
        if rows % buckets or rows < 2 * buckets:
            enough = max(2, -(-rows // buckets)) * buckets
            raise SetupError(
                f"table {table.name!r} has {rows:,} rows, which {buckets} buckets cannot share "
                f"equally. Set its num_embeddings to {enough:,}, or change option 'buckets'."
            )
        policy = (
            policies.LeastRecentlyUsed()
            if self.options.eviction == "lru"
            else policies.NoEviction()
        )
        return DynamicTable(buckets, rows // buckets - 1, policy, self.options.min_count)

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
            for table in tables
        }

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        from recd_plugin_dynamic.runtime.sharded import DynamicBagsSharder, DynamicEmbeddingsSharder

        more: dict[str, Any] = {"kernels": arguments.kernels, "coalesced": arguments.coalesced}
        return [
            made(arguments.fused_params, arguments.qcomm_codecs_registry, **more)
            for made in (DynamicBagsSharder, DynamicEmbeddingsSharder)
        ]
