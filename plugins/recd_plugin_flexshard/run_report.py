"""The section ``tiers`` of a run report: bytes sent for rows with and without copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from torch import nn

from recd_plugin_flexshard.planning import TIERS, Tier, TierPlan, plan_tiers, traffic
from recd_plugin_flexshard.runtime import ShardedTieredEmbeddingCollection
from recd_plugins.api import Section, TrainedRun, step_costs, text_utils

if TYPE_CHECKING:
    from recd_plugin_flexshard.runtime.retier import RetierReport
    from recd_plugins.api import data_profiles

_SHOWN_RETIERINGS = 10
_GROUPS = {"global": "all ranks", "node": "each node", "cross": "across nodes"}
_COLLECTIVES = {
    "all_to_all": "all-to-all",
    "all_reduce": "all-reduce",
    "sparse": "sparse sync",
}


@dataclass(frozen=True)
class TierBytes:
    """Bytes sent per step for rows copied to ranks, to nodes, or not copied, summed over ranks.

    ``observed`` is None if the run was too short to measure.
    """

    tier: Tier
    collective: str
    group: str
    observed: float | None
    predicted: float

    @property
    def ratio(self) -> float | None:
        if self.observed is None or not self.predicted:
            return None
        return self.observed / self.predicted


class OtherTables(NamedTuple):
    """Tables without row copies in the same EmbeddingCollections as tables with row copies.

    ``predicted`` and ``plain`` are predicted bytes per step, with and without deduplication.
    """

    names: tuple[str, ...] = ()
    predicted: float = 0.0
    plain: float = 0.0


NO_OTHERS = OtherTables()


@dataclass(frozen=True)
class TierReport(Section):
    """Bytes that a run sent for rows with and without copies, compared with row-wise sharding.

    Includes tables without row copies in the same EmbeddingCollections. ``row_wise`` and
    ``plain_row_wise`` are predicted bytes of row-wise sharding, with and without deduplication.
    """

    name: ClassVar[str] = "tiers"

    tiers: tuple[TierBytes, ...]
    row_wise: float
    plain_row_wise: float
    others: OtherTables
    retierings: tuple[RetierReport, ...] = ()

    @classmethod
    def of(
        cls,
        plans: Sequence[TierPlan],
        observed: Mapping[str, float] | None,
        others: OtherTables = NO_OTHERS,
        retierings: Sequence[RetierReport] = (),
    ) -> TierReport:
        tiers = []
        for tier in TIERS:
            parts = [traffic(plan)[tier] for plan in plans]
            predicted = others.predicted if tier == "cold" else 0.0
            predicted += sum(p.cluster.world_size * traffic(p)[tier].bytes for p in plans)
            # All entries of a collection use the same sync: sparse if one of them does.
            collective = max((part.collective for part in parts), key="sparse".__eq__)
            seen = None if observed is None else observed.get(tier, 0.0)
            tiers.append(TierBytes(tier, collective, parts[0].group, seen, predicted))
        return cls(
            tuple(tiers),
            others.predicted + sum(_row_wise(plan, deduplicated=True) for plan in plans),
            others.plain + sum(_row_wise(plan, deduplicated=False) for plan in plans),
            others,
            tuple(retierings),
        )

    @property
    def a2a_reduction(self) -> tuple[float | None, float]:
        """Return the observed and the predicted fraction of all-to-all bytes saved by row copies.

        Both are relative to row-wise sharding without deduplication.
        """
        cold = self.tiers[TIERS.index("cold")]
        if not self.plain_row_wise:
            return None, 0.0
        observed = None if cold.observed is None else 1 - cold.observed / self.plain_row_wise
        return observed, 1 - cold.predicted / self.plain_row_wise

    def as_json(self) -> dict[str, Any]:
        observed, predicted = self.a2a_reduction
        tiers = {tier.tier: asdict(tier) | {"ratio": tier.ratio} for tier in self.tiers}
        for values in tiers.values():
            del values["tier"]
        return {
            "tiers": tiers,
            "row_wise": self.row_wise,
            "plain_row_wise": self.plain_row_wise,
            "a2a_reduction": {"observed": observed, "predicted": predicted},
            "other_tables": list(self.others.names),
            "retierings": [asdict(each) for each in self.retierings],
        }

    def shown(self, run: str) -> Sequence[RenderableType]:
        lines = [str(report) for report in self.retierings[-_SHOWN_RETIERINGS:]]
        return [self._table(run), *(["\n".join(lines)] if lines else [])]

    def _table(self, run: str) -> Table:
        title = "tiers of rows: bytes sent per step by all ranks"
        table = Table(title=f"{run}, {title}" if run else title)
        for heading in ("", "collective", "over"):
            table.add_column(heading)
        for heading in ("observed", "predicted", "ratio"):
            table.add_column(heading, justify="right")
        for tier in self.tiers:
            if tier.predicted or tier.observed:
                table.add_row(
                    tier.tier.replace("_", " "),
                    _COLLECTIVES[tier.collective],
                    _GROUPS[tier.group],
                    text_utils.bytes_text(tier.observed),
                    text_utils.bytes_text(tier.predicted),
                    "" if tier.ratio is None else f"{tier.ratio:.3f}",
                )
        table.add_section()
        instead = {"row-wise": self.row_wise}
        if self.plain_row_wise != self.row_wise:
            instead["row-wise, plain"] = self.plain_row_wise
        for words, num_bytes in instead.items():
            table.add_row(
                words, "all-to-all", "all ranks", "", text_utils.bytes_text(num_bytes), ""
            )
        observed, predicted = self.a2a_reduction
        measured = "" if observed is None else f"{observed:.1%}, "
        table.caption = (
            f"bytes saved in the all-to-all of all ranks: {measured}predicted {predicted:.1%}"
        )
        if self.others.names:
            table.caption += f"\nincludes tables without tiers: {', '.join(self.others.names)}"
        return table


def _row_wise(plan: TierPlan, *, deduplicated: bool) -> float:
    """Return the predicted bytes per step of all ranks with TorchRec's row-wise sharding."""
    demands, options = plan.demands, plan.options
    if not deduplicated:
        demands = [replace(demand, dedupe_factor=1.0) for demand in demands]
        options = options.plain
    cold = traffic(plan_tiers(demands, plan.cluster, "row_wise", options))["cold"]
    return plan.cluster.world_size * cold.bytes


def report_tiers(plans: Sequence[TierPlan], run: TrainedRun) -> TierReport:
    """Return the report on bytes sent in a training run for rows with and without copies."""
    planned = {table.name for plan in plans for table in plan.tables}
    modules = tiered_modules(run.model)
    retierings = [report for module in modules.values() for report in module.retier_reports]
    shardings = {
        name: sharding
        for path in modules
        for name, sharding in run.plan.plan[path].items()
        if name not in planned
    }
    tables = [table for table in run.tables if table.name in shardings]
    if not tables:
        return TierReport.of(plans, run.sent, retierings=retierings)
    context, profile = run.context, run.context.data.profile()

    def sent(known: data_profiles.DataProfile) -> float:
        by_table = step_costs.bytes_of_tables(
            tables,
            shardings,
            known,
            batch_size=context.batch_size,
            world_size=context.world_size,
            wire_bytes=context.wire_bytes,
        )
        return sum(by_table.values())

    names = tuple(table.name for table in tables)
    others = OtherTables(names, sent(profile), sent(profile.plain()))
    return TierReport.of(plans, run.sent, others, retierings)


def tiered_modules(model: nn.Module) -> dict[str, ShardedTieredEmbeddingCollection]:
    """Return a dict from module path to sharded EmbeddingCollection with row copies."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ShardedTieredEmbeddingCollection)
    }
