"""The report of ``recd plan`` in a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugins.planning.plan_report import PlannedTable, PlanReport, SideReport
from recd_plugins.planning.topologies import TopologySpec

# Tables up to this many have a line each; more are put together where they are alike.
_LINES = 16
# Ranks up to this many have a bar each.
_BARS = 16
_BAR_WIDTH = 50
# Tables that coalescing makes worse are named up to this many.
_WORST = 3
# One each of what takes memory; of more they come again.
_MARKS = "█▓▞▒▚░·"


def render(report: PlanReport) -> RenderableType:
    """Topology, shards, memory, times and what the plugins changed."""
    parts: list[RenderableType] = [
        topology_line(report.topology, report.spec),
        _data(report),
        *_too_few_rows(report),
        *_wire(report),
        *([] if report.chosen is None else report.chosen.shown("")),
        _shards(report.plugins),
        *_said(report.plugins),
        *_coalesced(report.plugins),
        _memory(report),
    ]
    if report.spec.world_size <= _BARS:
        parts.append(_bars(report.plugins, report.spec.memory_bytes))
    parts += [_times(report), _changes(report)]
    spaced = [piece for part in parts for piece in (part, "")]
    return Group(*spaced[:-1])


def compressed(ranks: Iterable[int]) -> str:
    """Ranks in ascending order as ranges: ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else "")


def topology_line(name: str, spec: TopologySpec) -> Text:
    """Nodes, ranks, their memory and links."""
    nodes = "1 node" if spec.nodes == 1 else f"{spec.nodes:,} nodes"
    ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size:,} ranks"
    across = f", {spec.inter_node_bandwidth / 1e9:.3g} across nodes" if spec.nodes > 1 else ""
    return Text(
        f"{nodes} of {name}: {ranks} on {spec.device}, {size_text(spec.memory_bytes)} each, "
        f"{spec.intra_node_bandwidth / 1e9:.3g} GB/s in a node{across}"
    )


def size_text(num_bytes: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _data(report: PlanReport) -> Text:
    samples = report.profile.samples_per_session
    of_sessions = "" if samples is None else f", {samples:.1f} samples a session"
    return Text(f"lengths and dedupe factors: from {report.profile.source}{of_sessions}")


def _too_few_rows(report: PlanReport) -> Iterator[Text]:
    if report.too_few_rows:
        yield Text(f"recd run refuses this batch size with the data at hand: {report.too_few_rows}")


def _wire(report: PlanReport) -> Iterator[Text]:
    if report.wire != "fp32":
        yield Text(
            f"embeddings and gradients travel as {report.wire} (training.wire), which rounds them: "
            "losses are not those of fp32"
        )


def _shards(side: SideReport) -> Table:
    # Narrow columns, so that in 80 characters lines break between words.
    table = Table(
        title=f"Shards, {side.batch_size:,} rows a rank",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in ("table", "rows x dim", "sharding", "kernel", "ranks"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes a rank", justify="right", overflow="fold")
    table.add_column("dedupe factor", justify="right", overflow="fold")
    for tables in _alike(side.tables):
        first = tables[0]
        cached = "" if first.cached_rows is None else f"\n{first.cached_rows:,} cached"
        factors = [each.dedupe_factor for each in tables]
        low, high = f"{min(factors):.2f}", f"{max(factors):.2f}"
        table.add_row(
            _name(tables) + ("" if first.pooled else " (sequence)"),
            f"{first.num_embeddings:,} x {first.embedding_dim}",
            _sharding(first),
            first.compute_kernel + cached,
            compressed(sorted({rank for each in tables for rank in each.ranks})),
            size_text(max(each.bytes_per_rank for each in tables)),
            low if low == high else f"{low}-{high}",
        )
    return table


def _name(tables: Sequence[PlannedTable]) -> str:
    first = tables[0].name
    return first if len(tables) == 1 else f"{first} and {len(tables) - 1} more"


def _sharding(table: PlannedTable) -> str:
    """TorchRec's name, and whether ids are coalesced."""
    coalesced = ["coalesced"] if table.uncoalesced_vectors is not None else []
    return "\n".join([table.sharding_type, *coalesced])


def _said(side: SideReport) -> list[Text]:
    """What table parts say of tables, in lines of their own: a column is too narrow."""
    lines = [
        f"{_name(tables)}: {words}" for tables in _alike(side.tables) for words in tables[0].words
    ]
    return [Text("\n".join(lines))] if lines else []


def _coalesced(side: SideReport) -> list[Text]:
    """What coalescing makes of the vectors that come back: in all, and where it makes more."""
    found = [
        (table.vectors, table.uncoalesced_vectors, table.name)
        for table in side.tables
        if table.uncoalesced_vectors is not None
    ]
    if not found:
        return []
    mine, before = sum(each[0] for each in found), sum(each[1] for each in found)
    words = f"coalesced: {mine:,.0f} vectors come back to a rank in a step, without {before:,.0f}"
    more = [each for each in found if each[0] > each[1]]
    if more:
        more.sort(key=lambda each: each[1] - each[0])
        worst = ", ".join(f"{name} {got:,.0f} for {was:,.0f}" for got, was, name in more[:_WORST])
        words += f"; more than without for {len(more)} of {len(found)} tables: {worst}"
        words += ", ..." if len(more) > _WORST else ""
    return [Text(words)]


def _alike(tables: Sequence[PlannedTable]) -> list[list[PlannedTable]]:
    """Tables of one size that are sharded in one way, where there are too many for a line each."""
    if len(tables) <= _LINES:
        return [[table] for table in tables]
    found = defaultdict(list)
    for table in tables:
        spread = len(table.ranks) if len(table.ranks) > 1 else 1
        shape = (table.num_embeddings, table.embedding_dim, table.pooled)
        shown = (_sharding(table), table.words, table.compute_kernel, table.cached_rows)
        found[*shape, *shown, spread].append(table)
    return sorted(found.values(), key=lambda group: -max(each.bytes_per_rank for each in group))


def _memory(report: PlanReport) -> Table:
    table = Table(title="Memory of a rank", title_justify="left")
    table.add_column("")
    sides = _sides(report)
    for name, _ in sides:
        table.add_column(f"{name}: fullest", justify="right", overflow="fold")
        table.add_column("mean", justify="right", overflow="fold")
    fullest = {name: int(side.memory_by_rank.argmax()) for name, side in sides}
    for component in report.components:
        cells = [
            size_text(value)
            for name, side in sides
            for held in (side.held(component),)
            for value in (held[fullest[name]], held.mean())
        ]
        table.add_row(component, *cells)
    totals = [side.memory_by_rank for _, side in sides]
    table.add_section()
    table.add_row("total", *(size_text(v) for total in totals for v in (total.max(), total.mean())))
    capacity = report.spec.memory_bytes
    shares = [f"{v / capacity:.0%}" for total in totals for v in (total.max(), total.mean())]
    table.add_row(f"of {size_text(capacity)}", *shares)
    hosts = [side.host_memory for _, side in sides]
    if any(host.any() for host in hosts):
        in_hosts = (size_text(value) for host in hosts for value in (host.max(), host.mean()))
        table.add_row("tables in the memory of the node", *in_hosts)
    return table


def _bars(side: SideReport, capacity: int) -> Text:
    """Memory of each rank, to the width of what there is."""
    parts = np.stack(list(side.memory.values()))
    marks = dict(zip(side.memory, cycle(_MARKS), strict=False))
    edges = np.rint(np.cumsum(parts, axis=0) / capacity * _BAR_WIDTH).astype(int)
    lines = []
    for rank in range(parts.shape[1]):
        widths = np.diff(edges[:, rank], prepend=0)
        bar = "".join(mark * width for mark, width in zip(marks.values(), widths, strict=True))
        total = size_text(parts[:, rank].sum())
        lines.append(f"rank {rank:>2} |{bar:<{_BAR_WIDTH}}| {total}")
    legend = "  ".join(f"{mark} {component}" for component, mark in marks.items())
    return Text("\n".join([*lines, f"        {legend}"]))


def _times(report: PlanReport) -> Table:
    table = Table(
        title=f"{report.time_of_step.capitalize()} of a step",
        title_justify="left",
        caption=f"Costs: {report.costs_source}",
    )
    table.caption_justify = "left"
    table.add_column("stage")
    sides = _sides(report)
    for name, side in sides:
        table.add_column(f"{name} ({side.batch_size:,} rows)", justify="right", overflow="fold")
    if report.plain is not None:
        table.add_column("plugins / plain", justify="right", overflow="fold")
    rows = [side.seconds.as_dict() | {"total": side.seconds.total} for _, side in sides]
    for stage in rows[0]:
        if stage == "total":
            table.add_section()
        values = [row[stage] for row in rows]
        table.add_row(stage.replace("_", "-"), *map(_seconds, values), *_ratio(values))
    if report.spec.costs is None:
        return table  # a bound on time is no speed
    ranks = report.spec.world_size
    rates = [side.samples_per_second(ranks) for _, side in sides]
    table.add_row("samples a second", *(f"{rate:,.0f}" for rate in rates), *_ratio(rates))
    return table


def _changes(report: PlanReport) -> Text:
    plain, mine = report.plain, report.plugins
    if plain is None:
        return Text(f"Without the plugins {report.plain_problem}")
    lines = ["What the plugins change against plain TorchRec:"]
    if mine.batch_size == plain.batch_size:
        saved = plain.memory_by_rank.max() - mine.memory_by_rank.max()
        lines.append(
            f"  memory of the fullest rank: {size_text(plain.memory_by_rank.max())} -> "
            f"{size_text(mine.memory_by_rank.max())} "
            f"({size_text(abs(saved))} {'saved' if saved >= 0 else 'more'})"
        )
        faster = plain.seconds.total / mine.seconds.total
        gain = "" if faster >= 1 else ": they gain nothing here"
        lines.append(
            f"  {report.time_of_step} of a step: {_seconds(plain.seconds.total)} -> "
            f"{_seconds(mine.seconds.total)} ({faster:.2f}x as fast{gain})"
        )
    if mine.largest_batch_size and plain.largest_batch_size:
        more = mine.largest_batch_size / plain.largest_batch_size
        lines.append(
            f"  largest batch of a rank: {plain.largest_batch_size:,} -> "
            f"{mine.largest_batch_size:,} rows ({more:.2f}x); {plain.batch_step:,} and "
            f"{mine.batch_step:,} rows more do not fit"
        )
        if ends := [
            f"{name} ({side.data_ends})" for name, side in _sides(report) if side.data_ends
        ]:
            lines[-1] += f", as the data ends: {'; '.join(ends)}"
    for (before, after), names in report.changed().items():
        more = len(names) - 1
        others = f" and {more} more table{'s' * (more > 1)}" if more else ""
        listed = f"{names[0]}{others}"
        lines.append(f"  sharding: {listed}: {before} -> {after}")
    if not report.changed():
        lines.append("  sharding: every table is sharded alike")
    return Text("\n".join(lines))


def _sides(report: PlanReport) -> list[tuple[str, SideReport]]:
    sides = [("plugins", report.plugins)]
    return sides if report.plain is None else [*sides, ("plain", report.plain)]


def _ratio(values: Sequence[float]) -> list[str]:
    if len(values) < 2:
        return []
    return [f"{values[0] / values[1]:.2f}" if values[1] else "-"]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"
