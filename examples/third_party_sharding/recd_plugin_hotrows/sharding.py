"""Plugin ``hotrows.replicated``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder

    from recd_plugin_hotrows.strategy import HotStrategy


class HotRows(Sharding):
    """Shards sequence tables table-wise, and copies their most read rows to every rank."""

    name = "hotrows.replicated"

    class Options(PluginOptions):
        rows: int = Field(gt=0, description="Rows per table to copy to every rank.")

    options: Options

    def rewrite(self, model: nn.Module, tables: Sequence[Table], context: PlanContext) -> nn.Module:
        """Replace each EmbeddingCollection that contains one of ``tables`` by a HotCollection."""
        from torchrec import EmbeddingCollection

        from recd_plugin_hotrows.collection import HotCollection

        hot = {
            name: access.rows[: self.options.rows] for name, access in self._read(tables, context)
        }
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if isinstance(child, EmbeddingCollection) and any(
                    config.name in hot for config in child.embedding_configs()
                ):
                    setattr(parent, name, HotCollection(child, hot))
        return model

    def strategy(self, tables: Sequence[Table], context: PlanContext) -> HotStrategy | None:
        from recd_plugin_hotrows.strategy import HotStrategy, HotTable

        found = {
            table.name: HotTable(
                min(self.options.rows, len(access.rows)),
                access.covered(self.options.rows),
                table.embedding_dim,
            )
            for table, (_, access) in zip(tables, self._read(tables, context), strict=True)
        }
        return HotStrategy(found, context.world_size) if found else None

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(
                sharding_types=["table_wise"], compute_kernels=["fused"]
            )
            for table in tables
        }

    def sharders(self, arguments: SharderArguments) -> Sequence[ModuleSharder[nn.Module]]:
        from recd_plugin_hotrows.sharded import HotSharder

        return [
            HotSharder(
                arguments.fused_params, kernels=arguments.kernels, coalesced=arguments.coalesced
            )
        ]

    def _read(self, tables: Sequence[Table], context: PlanContext) -> list[tuple[str, Any]]:
        """Return the name and the access counts of each table.

        Raises:
            SetupError: a table is pooled, or the optimizer is not SGD.
        """
        if pooled := [table.name for table in tables if table.pooled]:
            raise SetupError(
                f"{self.name} supports only sequence tables, but the model pools "
                f"{', '.join(pooled)} in an EmbeddingBagCollection. Add their features to a "
                "pooling: entry, or use torchrec.table_wise."
            )
        if tables and context.optimizer != "sgd":
            raise SetupError(
                f"{self.name} supports only SGD, but training.optimizer is {context.optimizer!r}. "
                "Set optimizer: sgd, or use torchrec.table_wise."
            )
        profile = context.data.access(tables, 65_536) if tables else None
        return [
            (table.name, profile.covering(table.name, table.num_embeddings))
            for table in tables
            if profile is not None
        ]
