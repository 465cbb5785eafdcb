"""The plugin ``dynamic.table``."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

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

    from recd_plugin_dynamic.index.policies import EvictionPolicy
    from recd_plugin_dynamic.strategy import DynamicStrategy
    from recd_plugin_dynamic.table import DynamicTable


class DynamicSharding(Sharding):
    """Tables that map raw 63-bit ids to rows, insert new ids and evict old ones."""

    name = "dynamic.table"
    maps_ids = True

    class Options(PluginOptions):
        """Buckets, eviction and admission of ids."""

        buckets: int = Field(
            default=64,
            ge=1,
            description="Number of equally large buckets. A multiple of the number of ranks.",
        )
        eviction: str = Field(
            default="lru",
            description="Which ids a full bucket evicts: lru (earliest last batch), lfu (fewest "
            "batches), ttl (in no batch for more than 'steps' steps, also if the bucket is not "
            "full), none (an error), or MODULE:CLASS, an EvictionPolicy of your own.",
        )
        half_life: float | None = Field(
            default=None,
            gt=0,
            description="With eviction: lfu, number of steps after which a batch counts half; null "
            "for no decay.",
        )
        steps: int | None = Field(
            default=None,
            ge=1,
            description="With eviction: ttl, maximum number of steps without the id.",
        )
        min_count: int = Field(
            default=1,
            ge=1,
            description="An id gets a row in the min_count-th batch that contains it.",
        )
        coalesce: bool = Field(
            default=False, description="Send each distinct id only once per batch and rank."
        )

        @model_validator(mode="after")
        def _fits(self) -> Self:
            if self.half_life is not None and self.eviction != "lfu":
                raise ValueError("option 'half_life' needs eviction: lfu")
            if (self.steps is not None) != (self.eviction == "ttl"):
                raise ValueError(
                    "eviction: ttl needs option 'steps', and other evictions reject it"
                )
            return self

    options: Options

    @property
    def coalesces(self) -> bool:
        return self.options.coalesce

    def id_limit(self, table: Table) -> int | None:  # noqa: ARG002
        return None

    def identity(self) -> dict[str, Any]:
        """Return a digest of the source code of an eviction policy of the user."""
        policy = type(self._policy())
        if policy.__module__.startswith("recd_plugin_dynamic."):
            return {}
        return {"policy": sha256(inspect.getsource(policy).encode()).hexdigest()}

    def rewrite(self, model: nn.Module, tables: Sequence[Table], context: PlanContext) -> nn.Module:  # noqa: ARG002
        from recd_plugin_dynamic.runtime.collection import with_dynamic_tables

        return with_dynamic_tables(model, {each.name: self._layout(each) for each in tables})

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> DynamicStrategy | None:
        if not tables:
            return None
        from recd_plugin_dynamic.strategy import DynamicStrategy

        return DynamicStrategy({each.name: self._layout(each) for each in tables}, context)

    def ids_of_rows(self, table: str, read: Callable[[str], Tensor]) -> Tensor:
        return read(f".row_state.{table}.ids")

    def _layout(self, table: Table) -> DynamicTable:
        from recd_plugin_dynamic.table import DynamicTable

        buckets, rows = self.options.buckets, table.num_embeddings
        if rows % buckets or rows < 2 * buckets:
            enough = max(2, -(-rows // buckets)) * buckets
            raise SetupError(
                f"table {table.name!r} has {rows:,} rows, which {buckets} buckets cannot share "
                f"equally. Set its num_embeddings to {enough:,}, or change option 'buckets'."
            )
        return DynamicTable(buckets, rows // buckets, self._policy(), self.options.min_count)

    def _policy(self) -> EvictionPolicy:
        from recd_plugin_dynamic.index import policies

        options = self.options
        match options.eviction:
            case "none":
                return policies.NoEviction()
            case "lru":
                return policies.LeastRecentlyUsed()
            case "lfu":
                return policies.LeastFrequentlyUsed(options.half_life)
            case "ttl":
                assert options.steps is not None  # validated
                return policies.TimeToLive(options.steps)
        try:
            own: EvictionPolicy = pkgutil.resolve_name(options.eviction)()
        except (ImportError, AttributeError, ValueError) as error:
            raise SetupError(
                f"dynamic.table: eviction {options.eviction!r} is not lru, lfu, ttl or none, and "
                f"cannot be imported: {error}. Correct the name, as in 'my_module:MyPolicy'."
            ) from error
        return own

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        from torchrec.distributed.planner.types import ParameterConstraints

        return {table.name: ParameterConstraints(sharding_types=["row_wise"]) for table in tables}

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        from recd_plugin_dynamic.runtime.sharded import DynamicBagsSharder, DynamicEmbeddingsSharder

        more: dict[str, Any] = {"kernels": arguments.kernels, "coalesced": arguments.coalesced}
        return [
            made(arguments.fused_params, arguments.qcomm_codecs_registry, **more)
            for made in (DynamicBagsSharder, DynamicEmbeddingsSharder)
        ]
