"""What the three plugins do alike: plan tiers, and put them into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from recd_plugin_flexshard.options import TierOptions
from recd_plugins.api import Setting, SetupError, SharderArguments, Sharding, Table
from recd_plugins.api.registry import shortened

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder

    from recd_plugin_flexshard.part import TieredPart
    from recd_plugin_flexshard.planning import TierPlan


class TieredSharding(Sharding):
    """Cold rows are the user's row-wise table; copies of hot and flex rows are laid over it."""

    strategy: ClassVar[Literal["two_tier", "three_tier", "joint"]]

    class Options(TierOptions):
        """The options that all have."""

    options: TierOptions
    _planned: tuple[tuple[Sequence[Table], Setting], TierPlan] | None = None

    @property
    def coalesces(self) -> bool:
        """As the option says."""
        return self.options.coalesce

    def rewrite(self, model: nn.Module, tables: Sequence[Table], setting: Setting) -> nn.Module:
        """Put TieredEmbeddingCollections with the tiers of ``tables`` into ``model``.

        Raises:
            SetupError: see ``part``.
        """
        from recd_plugin_flexshard.rewrite import with_tiers
        from recd_plugin_flexshard.runtime import RowTiers

        plan = self._plan(tables, setting)
        if plan is None:
            return model
        rows = {table.name: RowTiers(table.hot_rows, table.flex_rows) for table in plan.tables}
        return with_tiers(model, rows, self.options.retier_every, plan.syncs.sparse)

    def part(self, tables: Sequence[Table], setting: Setting) -> TieredPart | None:
        """The tiers of ``tables``, planned together.

        Raises:
            SetupError: a table is pooled; or there is no such plan, as with a flex tier on one
                node or a budget that cannot be kept.
            DataError: the data cannot be read, or the access profile is not of these tables.
        """
        from recd_plugin_flexshard.part import TieredPart

        plan = self._plan(tables, setting)
        return None if plan is None else TieredPart(plan)

    def _plan(self, tables: Sequence[Table], setting: Setting) -> TierPlan | None:
        """Made once for a setting."""
        if not tables:
            return None
        self._refuse_pooled(tables)
        key = (tuple(tables), setting)
        if self._planned is None or self._planned[0] != key:
            from recd_plugin_flexshard.plan import plan

            self._planned = key, plan(self.strategy, self.options, tables, setting)
        return self._planned[1]

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Row-wise, with the kernel whose optimizer runs in the backward pass."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
            for table in tables
        }

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        """The sharder of TieredEmbeddingCollections."""
        from recd_plugin_flexshard.runtime import TieredEmbeddingCollectionSharder

        return [
            TieredEmbeddingCollectionSharder(
                arguments.fused_params,
                arguments.qcomm_codecs_registry,
                kernels=arguments.kernels,
                coalesced=arguments.coalesced,
            )
        ]

    def _refuse_pooled(self, tables: Sequence[Table]) -> None:
        pooled = [table for table in tables if table.pooled]
        if pooled:
            names = shortened([table.name for table in pooled])
            features = shortened([feature for table in pooled for feature in table.features])
            raise SetupError(
                f"{self.name} is for tables of sequences, and {names} "
                f"{'is' if len(pooled) == 1 else 'are'} looked up in bags (an "
                "EmbeddingBagCollection), which sends one vector a row of the batch however long "
                f"its list is: name {features} in a pooling: entry if these are sequences, or use "
                "torchrec.row_wise"
            )
