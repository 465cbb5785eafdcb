"""The report of ``recd plan --cache``, in a terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_scars.planning.cache_plan_report import CachePlanReport, CurvePoint, traffic_bytes
from recd_plugin_scars.planning.plan import CachedTable
from recd_plugin_scars.planning.rates import measured_rates, rates_of
from recd_plugins.api.files import write_figure
from recd_plugins.api.pages import plot_style
from recd_plugins.api.planning import size_text, topology_line

# Tables up to this many have a line each; of more, those that move most.
_LINES = 16
_CURVE_LINES, _BAR = 10, 16
_LIMITS = {
    "memory": "the memory is full",
    "useful": "no further row is read more than once in {steps:,} steps",
    "batch": "further rows would cost more, by a smaller batch, than they save",
    "room": "no row more has room beside the least batch",
}


def render(report: CachePlanReport) -> RenderableType:
    """Ranks and costs, caches by table, traffic of a step, and the curve of sizes."""
    limit = _LIMITS[report.limit].format(steps=report.steps)
    parts: list[RenderableType] = [
        topology_line(report.topology, report.spec),
        _assumptions(report),
        "",
        _caches(report),
        Text(f"the cache ends where {limit}"),
        "",
        _traffic(report),
        "",
        _curve(report),
    ]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    return Group(*parts)


def _assumptions(report: CachePlanReport) -> Text:
    rates = rates_of(report.spec)
    ranks = report.spec.world_size
    searched = "" if report.shared is None else ", searched"
    kind = "measured" if measured_rates(report.spec) else "assumed; --calibrate measures them"
    lines = [
        f"{report.plan.batch_size:,} samples a step ({report.plan.batch_size // ranks:,} rows a "
        f"rank{searched}), {report.plan.optimizer}; reads of rows: {report.source}",
        f"costs, {kind}: {rates.step_seconds * 1e3:.3g} ms an iteration (tau), "
        f"{rates.sample_seconds * 1e6:.3g} us a sample, {rates.byte_seconds * 1e9:.3g} s a GB of "
        "rows fetched and written back",
    ]
    if report.shared is not None:
        lines.append(
            f"memory for rows and batch: {size_text(report.shared.total)}, of which a sample takes "
            f"{size_text(report.shared.sample)}"
        )
    return Text("\n".join(lines))


def _new(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _shown(report: CachePlanReport) -> tuple[list[CachedTable], int]:
    """Tables with a line of their own, and how many have none."""
    tables = list(report.plan.tables.values())
    if len(tables) <= _LINES:
        return tables, 0
    most = sorted(tables, key=lambda table: -table.traffic.coalesced_bytes)[:_LINES]
    return most, len(tables) - _LINES


def _caches(report: CachePlanReport) -> Table:
    budget = "" if report.memory is None or report.shared else f" within {size_text(report.memory)}"
    columns = ("table", "rows", "useful", "cached", "share", "bytes", "lookups hit", "rows hit")
    lines = _new(f"Caches{budget}: the most read rows", columns)
    shown, others = _shown(report)
    for table in shown:
        lines.add_row(
            table.load.name,
            f"{table.load.num_embeddings:,}",
            f"{table.useful:,}",
            f"{table.cached:,}",
            f"{table.load_factor:.1%}",
            size_text(table.cached_bytes),
            f"{table.load.covered(table.cached):.1%}",
            f"{table.traffic.hit_rate:.1%}",
        )
    tables = list(report.plan.tables.values())
    if len(tables) > 1:
        rows = sum(table.load.num_embeddings for table in tables)
        cached = sum(table.cached for table in tables)
        lookups = sum(table.traffic.lookups for table in tables)
        unique = sum(table.traffic.unique_rows for table in tables)
        hit = sum(table.traffic.lookups * table.load.covered(table.cached) for table in tables)
        lines.add_section()
        lines.add_row(
            f"all {len(tables)}" if others else "all",
            f"{rows:,}",
            f"{sum(table.useful or 0 for table in tables):,}",
            f"{cached:,}",
            f"{cached / rows:.1%}",
            size_text(report.plan.cached_bytes),
            f"{hit / lookups:.1%}",
            f"{sum(table.traffic.hits for table in tables) / unique:.1%}",
        )
    return lines


def _traffic(report: CachePlanReport) -> Table:
    lines = _new(
        "Rows of a step, read from the backing store and written back",
        ("table", "plain", "coalesced", "cached", "both", "plain / both"),
    )
    shown, others = _shown(report)
    for table in shown:
        _traffic_line(lines, table.load.name, [table])
    tables = list(report.plan.tables.values())
    if len(tables) > 1:
        lines.add_section()
        _traffic_line(lines, f"all {len(tables)}" if others else "all", tables)
    lines.caption = f"LRU caches of the same sizes: about {size_text(report.lru_bytes)} in all"
    lines.caption_justify = "left"
    return lines


def _traffic_line(lines: Table, name: str, tables: Sequence[CachedTable]) -> None:
    moved = traffic_bytes([table.traffic for table in tables])
    less = f"{moved['plain'] / moved['both']:.1f}" if moved["both"] else "all"
    lines.add_row(name, *(size_text(num_bytes) for num_bytes in moved.values()), less)


def _curve(report: CachePlanReport) -> Table:
    lines = _new(
        "More or less cached: what a sample takes of a rank",
        ("rows", "bytes", "samples a step", "moved", "us", "", ""),
    )
    lines.columns[0].justify = "right"
    lines.columns[-1].justify = "left"
    points = _some(report.curve, report.chosen)
    least = min(point.seconds for point in points)
    # Sizes that take the batch nearly all of its room cost many times the least.
    above = min(max(point.seconds for point in points) - least, least)
    for point in points:
        part = min(1.0, (point.seconds - least) / above) if above else 0.0
        lines.add_row(
            f"{point.rows:,}",
            size_text(point.bytes),
            f"{point.batch_size:,.0f}",
            size_text(point.moved),
            f"{point.seconds * 1e6:.4g}",
            "*" if point == report.chosen else "",
            "#" * round(_BAR * part),
        )
    lines.caption = "* chosen; bars: time above the least; moved: sum of u, without lookahead"
    lines.caption_justify = "left"
    return lines


def _some(curve: Sequence[CurvePoint], chosen: CurvePoint) -> list[CurvePoint]:
    """A few of many, evenly, and the chosen one."""
    step = max(1, (len(curve) - 1) // (_CURVE_LINES - 1))
    found = {point.rows: point for point in [*curve[::step], curve[-1], chosen]}
    return [found[rows] for rows in sorted(found)]


@plot_style()
def plot(report: CachePlanReport, path: Path) -> None:
    """What a sample takes, and what a step moves, against cached rows, with the chosen size.

    Args:
        report: what to show.
        path: a file whose suffix says its format, as ``.png`` or ``.svg``.

    Raises:
        RecdError: the file cannot be written, or matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    cost, moved = figure.subplots(1, 2)
    rows = [point.rows for point in report.curve]
    cost.plot(rows, [point.seconds * 1e6 for point in report.curve])
    cost.plot(report.chosen.rows, report.chosen.seconds * 1e6, "r*", markersize=14, label="chosen")
    cost.set(title="Time of a sample (f)", ylabel="us of a rank")
    moved.plot(rows, [point.moved / 2**20 for point in report.curve], label="both ways")
    moved.plot(report.chosen.rows, report.chosen.moved / 2**20, "r*", markersize=14, label="chosen")
    moved.set(title="Moved in a step", ylabel="MiB")
    if report.shared is not None:
        batch = moved.twinx()
        batch.plot(rows, [p.batch_size for p in report.curve], color="gray", linestyle="--")
        batch.set_ylabel("samples of a step (dashed)")
    for axes in (cost, moved):
        axes.set_xlabel("cached rows of all tables")
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{report.spec.world_size:,} ranks of {report.topology}, "
        f"{report.plan.batch_size:,} samples a step"
    )
    write_figure(path, figure)
