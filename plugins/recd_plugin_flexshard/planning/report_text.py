"""The report of ``recd plan --tiers`` in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_flexshard.planning.cluster import CollectiveSeconds
from recd_plugin_flexshard.planning.plan import TierPlan
from recd_plugin_flexshard.planning.sections import memory_of
from recd_plugin_flexshard.planning.tier_plan_report import (
    EntryTiers,
    TierRows,
    TiersReport,
    merged,
)
from recd_plugin_flexshard.planning.traffic import sync_bytes
from recd_plugins.api.planning import size_text, topology_line

# Tables up to this many have a line each; of more, those with the most accesses.
_LINES = 16
#: FlexShard's four points in words.
POINT_NAMES = {
    "least_memory": "least memory",
    "memory_neutral": "zero extra memory",
    "least_communication": "least communication",
    "data_parallel": "all DP",
}
#: The collectives of ``Collectives`` in words.
COLLECTIVE_NAMES = {
    "a2a_global": "all-to-all, all ranks",
    "a2a_intra": "all-to-all, in a node",
    "ar_global": "all-reduce, all ranks",
    "ar_cross": "all-reduce, across nodes",
}


def render(report: TiersReport) -> RenderableType:
    """The topology, then each entry: tiers by table, strategies side by side, points and times."""
    parts: list[RenderableType] = [
        topology_line(report.topology, report.spec),
        _assumptions(report),
    ]
    for entry in report.entries:
        parts += ["", *_entry(entry)]
    return Group(*parts)


def _assumptions(report: TiersReport) -> Text:
    spec = report.spec
    rates = "of the topology" if spec.collectives else "what its bandwidths allow"
    memory = "measured, where the registry has none" if memory_of(spec) else "assumed"
    return Text(f"{report.batch_size:,} rows a rank; collectives: {rates}; M and c: {memory}")


def _entry(entry: EntryTiers) -> Iterator[RenderableType]:
    plan = entry.plan
    options = plan.options
    yield Text(
        f"{entry.field} {entry.plugin}: M = {options.memory_multiplier:.3g}, "
        f"c = {options.saved_activations:.3g}, "
        f"{'least bytes' if options.minimise == 'bytes' else 'least time'} within "
        f"{_budget(plan)}"
    )
    yield _tables(entry)
    yield _strategies(entry)
    yield _times(entry)
    yield _points(entry)
    if syncs := "; ".join(_syncs(plan)):
        yield Text(f"Gradients of copies, bytes of a rank: {syncs}")
    for strategy, problem in entry.problems.items():
        yield Text(f"no {words(strategy)}: {problem}")
    yield Text(
        f"Predicted against plain row-wise: {plan.a2a_reduction:.1%} less in the all-to-all of all "
        f"ranks, {_change(plan)} memory of a rank"
    )


def _syncs(plan: TierPlan) -> Iterator[str]:
    """How they are summed, and what the other way would send."""
    words = {"dense": "all rows", "sparse": "touched rows"}
    for tier, by_sync in sync_bytes(plan).items():
        if any(getattr(table, tier) for table in plan.tables):
            chosen = getattr(plan.syncs, tier)
            others = "".join(
                f" ({words[sync]}: {size_text(sent)})"
                for sync, sent in by_sync.items()
                if sync != chosen
            )
            yield f"{tier} {size_text(by_sync[chosen])} of {words[chosen]}{others}"


def _tables(entry: EntryTiers) -> Table:
    """Like table 5 of FlexShard."""
    table = _new_table("Rows by tier (DP: data-parallel), share of ids")
    table.add_column("table", overflow="fold")
    _numbers(table, "rows", "ids", "DP", "", "flex", "", "row-wise")
    tables = sorted(entry.tables, key=lambda table: -table.length)
    for rows in tables[:_LINES] if len(tables) > _LINES else entry.tables:
        table.add_row(*_tier_cells(rows))
    if len(tables) > _LINES:
        table.add_row(f"and {len(tables) - _LINES:,} with fewer accesses")
    if len(tables) > 1:
        table.add_section()
        table.add_row(*_tier_cells(merged(entry.plan)))
    return table


def _tier_cells(rows: TierRows) -> Iterator[str]:
    yield rows.name
    yield f"{rows.rows:,}"
    yield f"{rows.length:,.1f}"
    yield from _tier(rows.hot, rows.hot_share)
    yield from _tier(rows.flex, rows.flex_share)
    yield f"{rows.cold_share:.1%}"


def _tier(count: int, share: float) -> tuple[str, str]:
    return (f"{count:,}", f"{share:.1%}") if count else ("-", "")


def _strategies(entry: EntryTiers) -> Table:
    table = _new_table("Strategies: rows of all tables, and what they save")
    table.add_column("", no_wrap=True)
    _numbers(table, "DP", "", "flex", "", "a2a saved", "memory", "x RW")
    memory = entry.plan.row_wise_memory_bytes
    table.add_row("row-wise (RW)", "-", "", "-", "", "0.0%", size_text(memory), "1.00")
    for strategy, plan in entry.alternatives.items():
        rows = merged(plan)
        table.add_row(
            _marked(entry, strategy),
            *_tier(rows.hot, rows.hot_share),
            *_tier(rows.flex, rows.flex_share),
            f"{plan.a2a_reduction:.1%}",
            size_text(plan.memory_bytes),
            _ratio(plan),
            style="bold" if strategy == entry.plan.strategy else None,
        )
    table.caption = "* of the registry; a2a: bytes of the all-to-all of all ranks"
    table.caption_justify = "left"
    return table


def _times(entry: EntryTiers) -> Table:
    """Like table 6 of FlexShard."""
    table = _new_table("Collectives of a step, predicted milliseconds")
    table.add_column("", no_wrap=True)
    columns = {"row-wise": entry.plan.row_wise_seconds} | {
        _marked(entry, strategy): plan.seconds for strategy, plan in entry.alternatives.items()
    }
    _numbers(table, *columns)

    def add(name: str, of: Callable[[CollectiveSeconds], float]) -> None:
        table.add_row(name, *(_milliseconds(of(seconds)) for seconds in columns.values()))

    for field, name in COLLECTIVE_NAMES.items():
        add(name, lambda seconds, field=field: getattr(seconds, field))  # type: ignore[misc]
    table.add_section()
    add("total", lambda seconds: seconds.exposed())
    # Nothing hides the all-to-all of all ranks.
    for overlap in sorted({entry.plan.options.overlap, 1.0} - {0.0}):
        name = f"exposed at {overlap:.0%} overlap"
        add(name, lambda seconds, share=overlap: seconds.exposed(share))  # type: ignore[misc]
    return table


def _points(entry: EntryTiers) -> Table:
    """FlexShard's four points."""
    overlap = entry.plan.options.overlap
    table = _new_table("Two tiers at any budget")
    table.add_column("", no_wrap=True)
    _numbers(table, "DP", "a2a saved", "memory", "x RW", "ms exposed")
    for name, plan in entry.points.items():
        table.add_row(
            POINT_NAMES[name],
            f"{merged(plan).hot:,}",
            f"{plan.a2a_reduction:.1%}",
            size_text(plan.memory_bytes),
            _ratio(plan),
            _milliseconds(plan.seconds.exposed(overlap)),
        )
    return table


def _new_table(title: str) -> Table:
    # Narrow columns, so that in 80 characters lines break between words.
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def _numbers(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")


def _marked(entry: EntryTiers, strategy: str) -> str:
    return words(strategy) + (" *" if strategy == entry.plan.strategy else "")


def words(strategy: str) -> str:
    """A strategy in words."""
    return {"two_tier": "two tiers", "three_tier": "three tiers"}.get(strategy, strategy)


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.{3 if milliseconds < 1 else 1}f}" if seconds else "-"


def _ratio(plan: TierPlan) -> str:
    ratio = plan.memory_bytes / plan.row_wise_memory_bytes
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def _budget(plan: TierPlan) -> str:
    options = plan.options
    if options.memory_bytes is not None:
        return size_text(options.memory_bytes)
    if options.memory_ratio == 1:
        return "the memory of row-wise"
    return f"{options.memory_ratio:g} times the memory of row-wise"


def _change(plan: TierPlan) -> str:
    more = plan.memory_bytes / plan.row_wise_memory_bytes - 1
    if abs(more) < 0.0005:
        return "the same"
    return f"{abs(more):.1%} {'more' if more > 0 else 'less'}"
