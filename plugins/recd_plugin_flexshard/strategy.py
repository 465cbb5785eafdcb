"""Cost estimates and reports of row-wise tables with row copies (FlexShard, arXiv 2301.02959)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from recd_plugin_flexshard.planning import TierPlan
from recd_plugin_flexshard.planning.costs import SCALAR_BYTES, CopyGroup
from recd_plugins.api import Section, StepShape, Table, TableStrategy, TrainedRun

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ParameterSharding

    from recd_plugins.api import stage_costs

# Sparse syncs of gradients use all-gather and all-to-all.
_GRADIENTS: tuple[stage_costs.CollectiveKind, ...] = ("all_reduce", "all_gather", "all_to_all")
_COLLECTIVES: dict[str, tuple[stage_costs.CollectiveKind, ...]] = {
    "cold": ("all_to_all",),
    "hot": _GRADIENTS,
    "flex": ("all_to_all",),
    "flex_gradients": _GRADIENTS,
}


class TieredStrategy(TableStrategy):
    """Memory, costs and report of row-wise tables with copies of frequently accessed rows."""

    def __init__(self, plan: TierPlan) -> None:
        self.plan = plan
        self._tables = {table.name: table for table in plan.tables}

    def needs_stock_kernels(self) -> Mapping[str, str]:
        why = (
            "makes copies of its frequent rows, which caches do not support. Remove the table "
            "from the cache: entry, or shard the table with torchrec.row_wise."
        )
        return dict.fromkeys(self._tables, why)

    def sharded_share(self, table: str) -> float:
        """Return the fraction of the table's lookups that use the row-wise shards, not copies."""
        tiers = self._tables.get(table)
        return 1.0 if tiers is None else tiers.shares_sent[2]

    def memory_of_rank(self, ranks_per_node: int, optimizer: str) -> Mapping[str, int]:
        """Return the name and bytes per rank of row copies, with optimizer state and gradients."""
        from recd_plugin_flexshard.runtime.collection import overlay_bytes

        hot, flex = Counter[int](), Counter[int]()
        for table in self.plan.tables:
            hot[table.demand.embedding_dim] += table.hot
            flex[table.demand.embedding_dim] += table.flex
        copies = sum(
            overlay_bytes(hot[dim], flex[dim], dim, ranks_per_node, optimizer)
            + SCALAR_BYTES * dim * (hot[dim] + -(-flex[dim] // ranks_per_node))
            for dim in hot
        )
        return {"copies of rows": copies}

    def activation_bytes(self, table: Table, ids: float) -> float:
        """Return the bytes of the embeddings that are looked up in copied rows.

        Embeddings of rows copied to each node count twice: in the buffer that is sent, and in the
        buffer that is received.
        """
        tiers = self._tables.get(table.name)
        if tiers is None:
            return 0.0
        hot, flex, _ = tiers.shares_sent
        return SCALAR_BYTES * table.embedding_dim * (hot + 2 * flex) * ids

    def work(
        self,
        table: Table,
        sharding: ParameterSharding,  # noqa: ARG002
        step: StepShape,
    ) -> Iterable[tuple[slice, stage_costs.StepCost]]:
        """Yield all ranks (a slice) with the cost per step of row copies (FlexShard, table 2)."""
        from recd_plugins.api import stage_costs, step_costs

        tiers = self._tables.get(table.name)
        if tiers is None:
            return
        batch_size, world_size, local, profile, wire_bytes = step
        nodes, width = world_size // local, table.embedding_dim * SCALAR_BYTES
        sent_width = table.embedding_dim * wire_bytes
        ids = profile.ids(table, batch_size)
        hot, flex = (ids * share for share in tiers.shares_sent[:2])
        hot_group, flex_group = CopyGroup(world_size, 1), CopyGroup(nodes, local)
        reduced = across = in_node = 0.0
        if self.plan.syncs.hot == "dense":
            reduced += hot_group.sent_of_reduced * tiers.hot * width
        else:
            sent = hot_group.sent_sparsely(tiers.hot, tiers.hot_exchanged * sent_width)
            in_node = (local - 1) / max(1, world_size - 1) * sent
            across = sent - in_node
        if self.plan.syncs.flex == "dense":
            reduced += flex_group.sent_of_reduced * tiers.flex * width
        else:
            across += flex_group.sent_sparsely(
                tiers.flex / local, tiers.flex_exchanged / local * sent_width
            )
        yield (
            step_costs.EVERY_RANK,
            stage_costs.StepCost(
                ids_looked_up=hot + flex,
                bytes_looked_up=(hot + flex) * width,
                rows_updated=min(hot, tiers.hot) + min(flex, tiers.flex / local),
                # All hot rows of a module share one lookup, as do all flex rows.
                lookups=(bool(tiers.hot) + bool(tiers.flex)) / len(self._tables),
                bytes_in_node=in_node
                + (local - 1) / local * flex * (step_costs.ID_BYTES + 2 * sent_width),
                bytes_across_nodes=across,
                bytes_reduced=reduced,
            ),
        )

    def collectives(self, tables: Collection[str]) -> int:
        """Return the number of collectives per step for row copies, besides all-reduces."""
        from recd_plugins.api import step_costs

        of_tables = [tiers for name, tiers in self._tables.items() if name in tables]
        cluster, syncs = self.plan.cluster, self.plan.syncs
        hot, flex = (any(getattr(t, tier) for t in of_tables) for tier in ("hot", "flex"))
        return (
            step_costs.COLLECTIVES * flex
            + CopyGroup.hot(cluster).calls(syncs.hot) * hot
            + CopyGroup.flex(cluster).calls(syncs.flex) * flex
        )

    def figures(self, table: str) -> Mapping[str, Any]:
        tiers = self._tables.get(table)
        if tiers is None:
            return {}
        copies = {"hot_rows": tiers.hot, "flex_rows": tiers.flex}
        return {**copies, "cold_share": tiers.cold_share}

    def describe(self, table: str) -> Sequence[str]:
        tiers = self._tables.get(table)
        if tiers is None:
            return ()
        copies = ((tiers.hot, "hot"), (tiers.flex, "flex"))
        return [f"{rows:,} {tier}" for rows, tier in copies if rows]

    def channels(self, model: nn.Module) -> Mapping[stage_costs.Channel, str]:
        from recd_plugin_flexshard.run_report import tiered_modules

        return {
            (group, kind): tier
            for module in tiered_modules(model).values()
            for group, tier in module.groups.names.items()
            for kind in _COLLECTIVES[tier]
        }

    @classmethod
    def sections(cls, parts: Sequence[Self], run: TrainedRun) -> Sequence[Section]:
        from recd_plugin_flexshard.run_report import report_tiers

        return [report_tiers([part.plan for part in parts], run)]
