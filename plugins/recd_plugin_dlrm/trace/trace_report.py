"""Trace profiles and synthetic traces as tables, as JSON and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from recd_plugin_dlrm.trace.generator import SHARES, TableTrace, total_variation, worst_difference
from recd_plugin_dlrm.trace.profile import TraceProfile
from recd_plugins.api import plot_style, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = (0.01, 0.05, 0.1, 0.5)
_MOST_CURVES = 12


@dataclass(frozen=True, eq=False)
class Synthetic:
    """A synthetic trace next to the profile that it was drawn from.

    Attributes:
        profile: of the original.
        new_share: the p0 that it was drawn with.
        num_ids: distinct ids in it.
        counts: int64 ``[k]``: its accesses by the distances of the profile.
    """

    profile: TableTrace
    new_share: float
    num_ids: int
    counts: NDArray[np.int64]


def profile_json(profile: TraceProfile) -> dict[str, Any]:
    """What ``render_profile`` shows and more, as JSON values."""
    return {
        "source": profile.source,
        "tables": {name: _figures(trace) for name, trace in profile.tables.items()},
    }


def render_profile(profile: TraceProfile) -> RenderableType:
    """A line a table, and under it what the columns mean."""
    lines = _table("accesses", "ids", "p0", "median", *(f"{share:.0%}" for share in _SHOWN))
    for name, trace in profile.tables.items():
        median = "-" if trace.median_distance is None else f"{trace.median_distance:,}"
        lines.add_row(
            name,
            f"{trace.accesses:,}",
            f"{len(trace.ids):,}",
            f"{trace.new_share:.4g}",
            median,
            *(f"{rate:.1%}" for rate in _shown_rates(trace.hit_rates(trace.cache_sizes()))),
        )
    meaning = "p0: share of new ids; median: of the distances of the others; N %: hit rate of an "
    return Group(f"traces of {profile.source}", lines, f"{meaning}LRU cache of so many of the ids")


def synthetic_json(traces: Sequence[Synthetic]) -> dict[str, Any]:
    """What ``render_synthetic`` shows and more, as JSON values."""
    return {trace.profile.table: _comparison(trace) for trace in traces}


def render_synthetic(traces: Sequence[Synthetic]) -> RenderableType:
    """How far each trace is from its original, and the hit rates of both."""
    lines = _table("ids", "of", "p0", "raised to", "worst", "variation")
    rates = _table("trace", *(f"{share:.0%}" for share in _SHOWN))
    for trace in traces:
        profile = trace.profile
        raised = trace.new_share > profile.new_share
        lines.add_row(
            profile.table,
            f"{trace.num_ids:,}",
            f"{len(profile.ids):,}",
            f"{profile.new_share:.4g}",
            f"{trace.new_share:.4g}" if raised else "-",
            f"{100 * worst_difference(profile, trace.counts):.2f} points",
            f"{total_variation(profile.counts, trace.counts):.4f}",
        )
        sizes = profile.cache_sizes()
        for name, counts in (("original", profile.counts), ("synthetic", trace.counts)):
            shown = _shown_rates(profile.hit_rates(sizes, counts))
            label = profile.table if name == "original" else ""
            rates.add_row(label, name, *(f"{rate:.1%}" for rate in shown))
    return Group(
        lines,
        "ids: distinct ones, of those of the original; p0: share of new ids; worst: the largest "
        "difference of hit rates at caches of 1 % to 50 % of the ids; variation: total variation "
        "of the distances",
        rates,
        "N %: hit rate of an LRU cache of so many of the original's ids",
    )


@plot_style()
def plot_profile(profile: TraceProfile, path: Path) -> None:
    """The distribution of distances, and LRU hit rates by size, of the tables with most accesses.

    Raises:
        RecdError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    traces = sorted(profile.tables.values(), key=lambda trace: -trace.accesses)
    for trace in traces[:_MOST_CURVES]:
        sums = np.cumsum(trace.counts[1:]) / max(1, trace.counts[1:].sum())
        left.step(trace.distances[1:], 100 * sums, where="post", label=trace.table)
        _draw_rates(right, trace, trace.counts, trace.table)
    left.set(
        xscale="log",
        xlabel="LRU stack distance of ids that are not new",
        ylabel="accesses at most so far (%)",
        ylim=(0, 101),
    )
    left.grid(alpha=0.3)
    _finish_rates(right)
    write_figure(path, figure)


@plot_style()
def plot_synthetic(traces: Sequence[Synthetic], path: Path) -> None:
    """LRU hit rates by size, of originals and synthetic traces.

    Raises:
        RecdError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, trace in enumerate(traces[:_MOST_CURVES]):
        table, color = trace.profile.table, f"C{number % 10}"
        _draw_rates(axes, trace.profile, trace.profile.counts, table, color=color)
        _draw_rates(
            axes, trace.profile, trace.counts, f"{table}, synthetic", color=color, linestyle=":"
        )
    _finish_rates(axes)
    write_figure(path, figure)


def _table(*headings: str) -> Table:
    lines = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    lines.add_column("table", overflow="fold", min_width=8)
    for heading in headings:
        lines.add_column(heading, justify="right", no_wrap=True)
    return lines


def _figures(trace: TableTrace) -> dict[str, Any]:
    rates = trace.hit_rates(trace.cache_sizes())
    return {
        "feature": trace.feature,
        "rows": trace.rows,
        "accesses": trace.accesses,
        "ids": len(trace.ids),
        "p0": trace.new_share,
        "median_distance": trace.median_distance,
        "hit_rates": _by_share(rates),
    }


def _comparison(trace: Synthetic) -> dict[str, Any]:
    profile = trace.profile
    sizes = profile.cache_sizes()
    return {
        "accesses": int(trace.counts.sum()),
        "ids": trace.num_ids,
        "p0": trace.new_share,
        "hit_rates": _by_share(profile.hit_rates(sizes, trace.counts)),
        "worst_hit_rate_difference": worst_difference(profile, trace.counts),
        "total_variation": total_variation(profile.counts, trace.counts),
        "original": _figures(profile),
    }


def _by_share(rates: NDArray[np.float64]) -> dict[str, float]:
    return {f"{share:.2f}": float(rate) for share, rate in zip(SHARES, rates, strict=True)}


def _shown_rates(rates: NDArray[np.float64]) -> list[float]:
    return [float(rates[int(np.searchsorted(SHARES, share - 1e-9))]) for share in _SHOWN]


def _draw_rates(
    axes: Axes,
    trace: TableTrace,
    counts: NDArray[np.int64],
    label: str,
    **style: Any,
) -> None:
    sizes = np.unique(np.geomspace(1, len(trace.ids), 200).round().astype(np.int64))
    rates = trace.hit_rates(sizes, counts)
    axes.plot(100 * sizes / len(trace.ids), 100 * rates, label=label, **style)


def _finish_rates(axes: Axes) -> None:
    axes.set(xscale="log", xlabel="ids in the cache (%)", ylabel="LRU hit rate (%)", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
