"""``flexshard.two_tier``, ``flexshard.three_tier`` and ``flexshard.joint``."""

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
    """Base of the tier plugins: row-wise tables, with copies of hot and flex rows."""

    tier_strategy: ClassVar[Literal["two_tier", "three_tier", "joint"]]

    class Options(TierOptions):
        """Options of all tier plugins."""

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
        """Plan the tiers, once per context."""
        if not tables:
            return None
        if pooled := [table for table in tables if table.pooled]:
            names = text_utils.shortened([table.name for table in pooled])
            features = text_utils.shortened(
                [feature for table in pooled for feature in table.features]
            )
            raise SetupError(
                f"{self.name} is for tables of sequences, but bags look up {names}: name "
                f"{features} in a pooling: entry if these are sequences, or use torchrec.row_wise"
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
    """Replicates frequently read rows of sequence tables, shards the rest row-wise (FlexShard)."""

    name = "flexshard.two_tier"
    tier_strategy: ClassVar[Literal["two_tier"]] = "two_tier"


class ThreeTier(TieredSharding):
    """Places rows of sequence tables on every rank, in every node, or row-wise (FlexShard)."""

    name = "flexshard.three_tier"
    tier_strategy: ClassVar[Literal["three_tier"]] = "three_tier"


class Joint(TieredSharding):
    """Chooses the best two or three tiers of rows for the topology and deduplicated data."""

    name = "flexshard.joint"
    tier_strategy: ClassVar[Literal["joint"]] = "joint"

    @classmethod
    def offers(cls, tables: Sequence[Table], context: PlanContext) -> Sequence[Mapping[str, Any]]:
        if context.world_size == 1 or any(table.pooled for table in tables):
            return []
        offers: list[dict[str, Any]] = [{}, {"coalesce": True}]
        if context.nodes > 1:
            # A coalesced table may need more memory than a plain one even without copied rows.
            offers += [{**each, "budget": "2x"} for each in offers]
        return offers
