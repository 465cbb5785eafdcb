"""Report of ``recd plan --tiers``: hot, flex and cold rows of tables, and alternative plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_flexshard.planning.costs import CollectiveSeconds
from recd_plugin_flexshard.planning.plan import Strategy, TableTiers, TierPlan, plan_tiers
from recd_plugins.api import SetupError, text_table, text_utils, topologies, topology_line

_STRATEGY_NAMES: dict[Strategy, str] = {
    "two_tier": "two tiers",
    "three_tier": "three tiers",
    "joint": "joint",
}
#: Fields of ``Collectives``.
COLLECTIVE_NAMES = {
    "a2a_global": "all-to-all, all ranks",
    "a2a_intra": "all-to-all, in a node",
    "ar_global": "all-reduce, all ranks",
    "ar_cross": "all-reduce, across nodes",
}
# Maximum number of tables with a line each; others are omitted, least accessed first.
_LINES = 16


@dataclass(frozen=True)
class TierRows:
    """Number of rows, and their share of accesses, in each tier of one or more tables.

    The tiers are hot (copied to every rank), flex (copied to every node) and cold (not copied).
    """

    name: str
    rows: int
    length: float
    hot: int
    hot_share: float
    flex: int
    flex_share: float
    cold: int
    cold_share: float

    @classmethod
    def of(cls, name: str, tables: Sequence[TableTiers]) -> TierRows:
        lengths = np.array([table.demand.length for table in tables])
        total = float(lengths.sum())
        hot, flex = (
            float(lengths @ [getattr(table, share) for table in tables]) / (total or 1.0)
            for share in ("hot_share", "flex_share")
        )
        rows = sum(table.demand.num_embeddings for table in tables)
        num_hot, num_flex = sum(t.hot for t in tables), sum(t.flex for t in tables)
        left = rows - num_hot - num_flex, max(0.0, 1.0 - hot - flex)
        return cls(name, rows, total, num_hot, hot, num_flex, flex, *left)


@dataclass(frozen=True)
class EntryTiers:
    """The rows to copy for one sharding entry, and the choices of the other flexshard plugins."""

    field: str
    plugin: str
    plan: TierPlan
    alternatives: Mapping[Strategy, TierPlan]

    @property
    def tables(self) -> list[TierRows]:
        return [TierRows.of(table.name, [table]) for table in self.plan.tables]

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "entry": self.field,
            "plugin": self.plugin,
            "strategy": plan.strategy,
            "options": asdict(plan.options),
            "tables": [asdict(table) for table in self.tables],
            "row_wise": {
                "memory_bytes": plan.row_wise_memory_bytes,
                "seconds": _seconds_json(plan.row_wise_seconds, plan.options.overlap),
            },
            "strategies": {name: _plan_json(plan) for name, plan in self.alternatives.items()},
        }


@dataclass(frozen=True)
class TiersReport:
    """Report of ``recd plan --tiers`` on all sharding entries that use a flexshard plugin."""

    topology: str
    spec: topologies.TopologySpec
    batch_size: int
    entries: Sequence[EntryTiers]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, for ``recd plan --tiers --json``."""
        return {
            "topology": topology_json(self.topology, self.spec),
            "batch_size": self.batch_size,
            "entries": [entry.as_json() for entry in self.entries],
        }


def study_entry(field: str, plugin: str, plan: TierPlan) -> EntryTiers:
    """Return ``plan`` of a sharding entry, and plans of other flexshard plugins in its budget."""
    alternatives: dict[Strategy, TierPlan] = {}
    for strategy in _STRATEGY_NAMES:
        if strategy == plan.strategy:
            alternatives[strategy] = plan
        elif strategy != "three_tier" or plan.cluster.nodes > 1:
            with suppress(SetupError):  # with plan_for, the budget may not fit this cluster
                alternatives[strategy] = plan_tiers(
                    plan.demands, plan.cluster, strategy, plan.options
                )
    return EntryTiers(field, plugin, plan, alternatives)


def topology_json(name: str, spec: topologies.TopologySpec) -> dict[str, Any]:
    """Return a topology as JSON values, including the speed of its collectives."""
    return {
        "name": name,
        **spec.model_dump(),
        "world_size": spec.world_size,
        "collectives": spec.collective_rates.model_dump(),
        "collectives_measured": spec.collectives is not None,
    }


def rows_by_tier(plan: TierPlan) -> dict[str, dict[str, int]]:
    """Return a dict from table name to the number of rows that are hot, flex and cold."""
    return {t.name: {"hot": t.hot, "flex": t.flex, "cold": t.cold} for t in plan.tables}


def _plan_json(plan: TierPlan) -> dict[str, Any]:
    return {
        "merged": asdict(TierRows.of("all", plan.tables)),
        "tables": rows_by_tier(plan),
        "memory_bytes": plan.memory_bytes,
        "a2a_reduction": plan.a2a_reduction,
        "seconds": _seconds_json(plan.seconds, plan.options.overlap),
        "sync": asdict(plan.syncs),
    }


def _seconds_json(seconds: CollectiveSeconds, overlap: float) -> dict[str, float]:
    return asdict(seconds) | {"total": seconds.exposed(), "exposed": seconds.exposed(overlap)}


def render(report: TiersReport) -> RenderableType:
    """Return the report for the terminal: the topology, then the plan of each entry."""
    spec = report.spec
    rates = "as measured" if spec.collectives else "estimated from bandwidths"
    parts: list[RenderableType] = [
        topology_line(report.topology, spec),
        Text(f"{report.batch_size:,} rows per rank; speed of collectives: {rates}"),
    ]
    for entry in report.entries:
        parts += ["", *_entry(entry)]
    return Group(*parts)


def _entry(entry: EntryTiers) -> Iterator[RenderableType]:
    plan, options = entry.plan, entry.plan.options
    times = "" if options.memory_ratio == 1 else f"{options.memory_ratio:g} times "
    budget = f"{times}the memory of row-wise sharding"
    if options.memory_bytes is not None:
        budget = text_utils.size_text(options.memory_bytes)
    yield Text(
        f"{entry.field} {entry.plugin}: M = {options.memory_multiplier:.3g}, "
        f"c = {options.saved_activations:.3g}, minimises {options.minimise} within {budget}"
    )
    yield _tables(entry)
    yield _strategies(entry)
    yield _times(entry)
    yield Text(
        f"Predicted, compared with plain row-wise sharding: {plan.a2a_reduction:.1%} fewer bytes "
        f"in the all-to-all of all ranks, {plan.memory_ratio - 1:+.1%} memory per rank"
    )


def _tables(entry: EntryTiers) -> Table:
    """Return a table of the rows in each tier, like table 5 of the FlexShard paper."""
    table = text_table(
        "Rows and fraction of ids by tier (DP: data-parallel)",
        ["table"],
        ("rows", "ids", "DP", "", "flex", "", "row-wise"),
    )
    rows = sorted(entry.tables, key=lambda table: -table.length)
    shown = rows[:_LINES]
    if len(rows) > 1:
        shown.append(TierRows.of(f"all {len(rows):,}", entry.plan.tables))
    for each in shown:
        cells = (f"{each.rows:,}", f"{each.length:,.1f}", *_tiers(each), f"{each.cold_share:.1%}")
        table.add_row(each.name, *cells, end_section=each is shown[-2:][0])
    return table


def _tiers(rows: TierRows) -> Iterator[str]:
    for count, share in ((rows.hot, rows.hot_share), (rows.flex, rows.flex_share)):
        yield from (f"{count:,}", f"{share:.1%}") if count else ("-", "")


def _strategies(entry: EntryTiers) -> Table:
    table = text_table(
        "Strategies: rows by tier over all tables, and savings",
        [""],
        ("DP", "", "flex", "", "a2a saved", "memory", "x RW"),
        caption="* in the registry file; a2a: bytes of the all-to-all of all ranks",
    )
    table.columns[0].no_wrap = True
    memory = entry.plan.row_wise_memory_bytes
    table.add_row("row-wise (RW)", "-", "", "-", "", "0.0%", text_utils.size_text(memory), "1.00")
    for strategy, plan in entry.alternatives.items():
        table.add_row(
            _marked(entry, strategy),
            *_tiers(TierRows.of("all", plan.tables)),
            f"{plan.a2a_reduction:.1%}",
            text_utils.size_text(plan.memory_bytes),
            f"{plan.memory_ratio:,.2f}",
        )
    return table


def _times(entry: EntryTiers) -> Table:
    """Return a table of the predicted time of collectives, like table 6 of the FlexShard paper."""
    columns = {"row-wise": entry.plan.row_wise_seconds} | {
        _marked(entry, strategy): plan.seconds for strategy, plan in entry.alternatives.items()
    }
    table = text_table("Collectives of a step, predicted milliseconds", [""], list(columns))
    table.columns[0].no_wrap = True
    lines = {
        name: [getattr(each, field) for each in columns.values()]
        for field, name in COLLECTIVE_NAMES.items()
    }
    # The global all-to-all is never hidden.
    for overlap in sorted({0.0, entry.plan.options.overlap}):
        name = f"exposed at {overlap:.0%} overlap" if overlap else "total"
        lines[name] = [each.exposed(overlap) for each in columns.values()]
    for name, seconds in lines.items():
        cells = (f"{1e3 * each:,.{3 if each < 1e-3 else 1}f}" if each else "-" for each in seconds)
        table.add_row(name, *cells)
    return table


def _marked(entry: EntryTiers, strategy: Strategy) -> str:
    return _STRATEGY_NAMES[strategy] + (" *" if strategy == entry.plan.strategy else "")
