"""The plugins ``flexshard.two_tier``, ``flexshard.three_tier`` and ``flexshard.joint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from recd_plugin_flexshard.options import TierOptions
from recd_plugins.api import PlanContext, SetupError, SharderArguments, Sharding, Table, text_utils

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder

    from recd_plugin_flexshard.planning import TierPlan
    from recd_plugin_flexshard.strategy import TieredStrategy


class TieredSharding(Sharding):
    """Base class of the flexshard plugins, which shard tables row-wise and copy frequent rows."""

    tier_strategy: ClassVar[Literal["two_tier", "three_tier", "joint"]]

    class Options(TierOptions):
        """Options of the three flexshard plugins."""

    options: TierOptions
    _planned: tuple[tuple[Sequence[Table], PlanContext], TierPlan] | None = None

    @property
    def coalesces(self) -> bool:
        return self.options.coalesce

    def rewrite(self, model: nn.Module, tables: Sequence[Table], context: PlanContext) -> nn.Module:
        from recd_plugin_flexshard.runtime.collection import RowTiers, with_tiers

        plan = self._plan(tables, context)
        if plan is None:
            return model
        rows = {table.name: RowTiers(table.hot_rows, table.flex_rows) for table in plan.tables}
        return with_tiers(model, rows, self.options.retier_every, plan.syncs.sparse)

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> TieredStrategy | None:
        from recd_plugin_flexshard.strategy import TieredStrategy

        plan = self._plan(tables, context)
        return None if plan is None else TieredStrategy(plan)

    def _plan(self, tables: Sequence[Table], context: PlanContext) -> TierPlan | None:
        """Choose the rows to copy, or return None without tables. Caches the last result."""
        if not tables:
            return None
        if pooled := [table for table in tables if table.pooled]:
            names = text_utils.shortened([table.name for table in pooled])
            features = text_utils.shortened(
                [feature for table in pooled for feature in table.features]
            )
            raise SetupError(
                f"{self.name!r} supports only tables of sequence features, but the model pools the "
                f"tables {names} in an EmbeddingBagCollection. Add the features {features} to a "
                "pooling: entry, or use the sharding plugin 'torchrec.row_wise'."
            )
        key = (tuple(tables), context)
        if self._planned is None or self._planned[0] != key:
            from recd_plugin_flexshard.table_plan import plan_tables

            self._planned = key, plan_tables(self.tier_strategy, self.options, tables, context)
        return self._planned[1]

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
            for table in tables
        }

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        from recd_plugin_flexshard.runtime import TieredEmbeddingCollectionSharder

        return [
            TieredEmbeddingCollectionSharder(
                arguments.fused_params,
                arguments.qcomm_codecs_registry,
                kernels=arguments.kernels,
                coalesced=arguments.coalesced,
            )
        ]


class TwoTier(TieredSharding):
    """Shards sequence tables row-wise and copies frequent rows to every rank (FlexShard)."""

    name = "flexshard.two_tier"
    tier_strategy: ClassVar[Literal["two_tier"]] = "two_tier"


class ThreeTier(TieredSharding):
    """Shards sequence tables row-wise and copies frequent rows to every rank or every node."""

    name = "flexshard.three_tier"
    tier_strategy: ClassVar[Literal["three_tier"]] = "three_tier"


class Joint(TieredSharding):
    """Copies frequent rows to ranks or nodes, whichever is faster for this topology and data."""

    name = "flexshard.joint"
    tier_strategy: ClassVar[Literal["joint"]] = "joint"

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        if context.world_size == 1 or any(table.pooled for table in tables):
            return []
        offers: list[dict[str, Any]] = [{}, {"coalesce": True}]
        if context.nodes > 1:
            # Coalescing may need more memory, even without row copies.
            offers += [{**each, "budget": "2x"} for each in offers]
        return offers
