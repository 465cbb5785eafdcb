"""The report of ``recd plan --cache``: the cache of each table, and the traffic that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_scars.planning.load import TableTraffic
from recd_plugin_scars.planning.order import Memory
from recd_plugin_scars.planning.plan import CachedTable, CachePlan
from recd_plugin_scars.planning.rates import measured_rates, rates_of
from recd_plugins.api import TopologySpec, plot_style, size_text, topology_line, write_figure

#: Why the cache is not larger: its memory is full; no further row is read often enough; the batch
#: would be too small; not one sample more has room.
Limit = Literal["memory", "useful", "batch", "room"]

# Up to this many tables have a line each; of more, those with the most traffic.
_LINES = 16
_LIMITS = {
    "memory": "the memory is full",
    "useful": "no further row is read more than once in {steps:,} steps",
    "batch": "further rows would cost more, by a smaller batch, than they save",
    "room": "no further row has room beside the least batch",
}


@dataclass(frozen=True)
class CurvePoint:
    """A size of the cache.

    Attributes:
        rows: cached, of all tables.
        bytes: of the fast memory.
        batch_size: samples of a step of all ranks.
        moved: bytes that a step moves between the stores, both ways.
        seconds: of a rank per sample; the cost model's f.
    """

    rows: int
    bytes: float
    batch_size: float
    moved: float
    seconds: float


@dataclass(frozen=True)
class CachePlanReport:
    """A plan of caches, and its reasons.

    Attributes:
        topology: name of the cluster.
        spec: its ranks and rates.
        source: origin of the reads of rows.
        plan: the caches of all tables.
        lru_bytes: bytes of a step with LRU caches of the same sizes.
        memory: bytes given to all ranks together; None: as much as pays.
        shared: what rows and batch share, where the batch size was searched.
        curve: sizes from nothing on.
        chosen: the size of the plan.
        limit: why the cache ends there.
        steps: a useful row is read more than once in so many.
        warnings: to be shown.
    """

    topology: str
    spec: TopologySpec
    source: str
    plan: CachePlan
    lru_bytes: float
    memory: float | None
    shared: Memory | None
    curve: Sequence[CurvePoint]
    chosen: CurvePoint
    limit: Limit
    steps: int
    warnings: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        rates = rates_of(self.spec)
        tables = list(self.plan.tables.values())
        return {
            "topology": {"name": self.topology, "ranks": self.spec.world_size},
            "costs": {**rates.model_dump(), "measured": measured_rates(self.spec) is not None},
            "reads": self.source,
            "batch_size": self.plan.batch_size,
            "memory_bytes": self.memory,
            "sample_bytes": self.shared.sample if self.shared else None,
            "steps": self.steps,
            "limit": self.limit,
            "tables": {table.load.name: _table(table) for table in tables},
            "bytes_per_step": traffic_bytes([table.traffic for table in tables])
            | {"lru": self.lru_bytes},
            "curve": [asdict(point) for point in self.curve],
            "chosen": asdict(self.chosen),
            "warnings": list(self.warnings),
        }


def traffic_bytes(tables: Sequence[TableTraffic]) -> dict[str, float]:
    """Bytes read and written in a step, of all ``tables`` together."""
    return {
        "plain": sum(table.plain_bytes for table in tables),
        "coalesced": sum(table.coalesced_bytes for table in tables),
        "cached": sum(table.cached_bytes for table in tables),
        "both": sum(table.bytes for table in tables),
    }


def render(report: CachePlanReport) -> RenderableType:
    """Render ranks and costs, the caches by table, and the traffic of a step."""
    limit = _LIMITS[report.limit].format(steps=report.steps)
    tables = sorted(report.plan.tables.values(), key=lambda t: -t.traffic.coalesced_bytes)
    shown = tables[:_LINES]
    parts: list[RenderableType] = [
        topology_line(report.topology, report.spec),
        _assumptions(report),
        "",
        _caches(report, shown),
        Text(f"the cache ends where {limit}"),
        "",
        _traffic(report, shown),
    ]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    return Group(*parts)


@plot_style()
def plot(report: CachePlanReport, path: Path) -> None:
    """Plot the time of a sample and the bytes of a step against cached rows.

    Args:
        report: to be shown.
        path: its suffix names the format, as ``.png`` or ``.svg``.

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


def _table(table: CachedTable) -> dict[str, Any]:
    traffic = table.traffic
    return {
        "rows": table.load.num_embeddings,
        "dim": table.load.embedding_dim,
        "read_rows": table.load.read_rows,
        "useful_rows": table.useful,
        "cached_rows": table.cached,
        "load_factor": table.load_factor,
        "cached_bytes": table.cached_bytes,
        "lookups": traffic.lookups,
        "unique_rows": traffic.unique_rows,
        "misses": traffic.misses,
        "hit_rate": traffic.hit_rate,
        "lookups_hit": table.load.covered(table.cached),
        "bytes_per_step": traffic_bytes([traffic]),
    }


def _assumptions(report: CachePlanReport) -> Text:
    rates, ranks = rates_of(report.spec), report.spec.world_size
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


def _caches(report: CachePlanReport, shown: Sequence[CachedTable]) -> Table:
    budget = "" if report.memory is None or report.shared else f" within {size_text(report.memory)}"
    columns = ("table", "rows", "useful", "cached", "share", "bytes", "lookups hit", "rows hit")
    lines = _new(f"Caches{budget}: the most read rows", columns)
    for table in shown:
        _cache_line(lines, table.load.name, [table])
    tables = list(report.plan.tables.values())
    if len(tables) > 1:
        lines.add_section()
        _cache_line(lines, f"all {len(tables)}", tables)
    return lines


def _cache_line(lines: Table, name: str, tables: Sequence[CachedTable]) -> None:
    rows = sum(table.load.num_embeddings for table in tables)
    cached = sum(table.cached for table in tables)
    lookups = sum(table.traffic.lookups for table in tables)
    hit = sum(table.traffic.lookups * table.load.covered(table.cached) for table in tables)
    unique = sum(table.traffic.unique_rows for table in tables)
    lines.add_row(
        name,
        f"{rows:,}",
        f"{sum(table.useful or 0 for table in tables):,}",
        f"{cached:,}",
        f"{cached / rows:.1%}",
        size_text(sum(table.cached_bytes for table in tables)),
        f"{hit / lookups:.1%}",
        f"{sum(table.traffic.hits for table in tables) / unique:.1%}",
    )


def _traffic(report: CachePlanReport, shown: Sequence[CachedTable]) -> Table:
    lines = _new(
        "Rows of a step, read from the backing store and written back",
        ("table", "plain", "coalesced", "cached", "both", "plain / both"),
    )
    for table in shown:
        _traffic_line(lines, table.load.name, [table])
    tables = list(report.plan.tables.values())
    if len(tables) > 1:
        lines.add_section()
        _traffic_line(lines, f"all {len(tables)}", tables)
    lines.caption = f"LRU caches of the same sizes: about {size_text(report.lru_bytes)} in all"
    lines.caption_justify = "left"
    return lines


def _traffic_line(lines: Table, name: str, tables: Sequence[CachedTable]) -> None:
    moved = traffic_bytes([table.traffic for table in tables])
    less = f"{moved['plain'] / moved['both']:.1f}" if moved["both"] else "all"
    lines.add_row(name, *(size_text(num_bytes) for num_bytes in moved.values()), less)
