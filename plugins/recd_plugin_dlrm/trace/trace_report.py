"""Trace profiles and synthetic traces as tables, JSON and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from recd_plugin_dlrm.trace.generator import (
    SHARES,
    TableTrace,
    TraceGenerator,
    total_variation,
    worst_difference,
)
from recd_plugin_dlrm.trace.profile import TraceProfile
from recd_plugins.api import plot_style, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = (0.01, 0.05, 0.1, 0.5)
_MOST_CURVES = 12


def profile_json(profile: TraceProfile) -> dict[str, Any]:
    """Return the figures of a profile as JSON values."""
    return {
        "source": profile.source,
        "tables": {name: _figures(trace) for name, trace in profile.tables.items()},
    }


def render_profile(profile: TraceProfile) -> RenderableType:
    """Return a table of a profile, and the meaning of its columns."""
    lines = _table("accesses", "ids", "p0", "median", *(f"{share:.0%}" for share in _SHOWN))
    for name, trace in profile.tables.items():
        median = "-" if trace.median_distance is None else f"{trace.median_distance:,}"
        counts = f"{trace.accesses:,}", f"{len(trace.ids):,}", f"{trace.new_share:.4g}"
        lines.add_row(name, *counts, median, *_shown_rates(trace, trace.counts))
    meaning = "p0: share of new ids; median: of the distances of the others; N %: hit rate of an "
    return Group(f"traces of {profile.source}", lines, f"{meaning}LRU cache of so many of the ids")


def synthetic_json(traces: Sequence[TraceGenerator]) -> dict[str, Any]:
    """Return the figures of drawn traces and their originals as JSON values."""
    return {
        trace.profile.table: {
            "accesses": trace.accesses,
            "ids": trace.num_ids,
            "p0": trace.new_share,
            "hit_rates": _by_share(trace.profile, trace.counts),
            "worst_hit_rate_difference": worst_difference(trace.profile, trace.counts),
            "total_variation": total_variation(trace.profile.counts, trace.counts),
            "original": _figures(trace.profile),
        }
        for trace in traces
    }


def render_synthetic(traces: Sequence[TraceGenerator]) -> RenderableType:
    """Return tables of drawn traces and of the hit rates of both."""
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
        rates.add_row(profile.table, "original", *_shown_rates(profile, profile.counts))
        rates.add_row("", "synthetic", *_shown_rates(profile, trace.counts))
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
    """Plot distances and LRU hit rates of the tables with most accesses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    traces = sorted(profile.tables.values(), key=lambda trace: -trace.accesses)
    for trace in traces[:_MOST_CURVES]:
        sums = np.cumsum(trace.counts[1:]) / max(1, trace.counts[1:].sum())
        left.step(trace.distances[1:], 100 * sums, where="post", label=trace.table)
        _draw_rates(right, trace, trace.counts, label=trace.table)
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
def plot_synthetic(traces: Sequence[TraceGenerator], path: Path) -> None:
    """Plot LRU hit rates of originals and drawn traces."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, trace in enumerate(traces[:_MOST_CURVES]):
        profile, color = trace.profile, f"C{number % 10}"
        _draw_rates(axes, profile, profile.counts, label=profile.table, color=color)
        label = f"{profile.table}, synthetic"
        _draw_rates(axes, profile, trace.counts, label=label, color=color, linestyle=":")
    _finish_rates(axes)
    write_figure(path, figure)


def _table(*headings: str) -> Table:
    lines = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    lines.add_column("table", overflow="fold", min_width=8)
    for heading in headings:
        lines.add_column(heading, justify="right", no_wrap=True)
    return lines


def _figures(trace: TableTrace) -> dict[str, Any]:
    return {
        "feature": trace.feature,
        "rows": trace.rows,
        "accesses": trace.accesses,
        "ids": len(trace.ids),
        "p0": trace.new_share,
        "median_distance": trace.median_distance,
        "hit_rates": _by_share(trace, trace.counts),
    }


def _by_share(trace: TableTrace, counts: NDArray[np.int64]) -> dict[str, float]:
    rates = trace.hit_rates(trace.cache_sizes(), counts)
    return {f"{share:.2f}": float(rate) for share, rate in zip(SHARES, rates, strict=True)}


def _shown_rates(trace: TableTrace, counts: NDArray[np.int64]) -> list[str]:
    rates = _by_share(trace, counts)
    return [f"{rates[f'{share:.2f}']:.1%}" for share in _SHOWN]


def _draw_rates(axes: Axes, trace: TableTrace, counts: NDArray[np.int64], **style: Any) -> None:
    sizes = np.unique(np.geomspace(1, len(trace.ids), 200).round().astype(np.int64))
    axes.plot(100 * sizes / len(trace.ids), 100 * trace.hit_rates(sizes, counts), **style)


def _finish_rates(axes: Axes) -> None:
    axes.set(xscale="log", xlabel="ids in the cache (%)", ylabel="LRU hit rate (%)", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
