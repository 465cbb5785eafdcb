"""The report of ``recd plan --tiers`` as a picture, like figure 5 of FlexShard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recd_plugin_flexshard.planning.plan import TierPlan
from recd_plugin_flexshard.planning.report_text import POINT_NAMES, words
from recd_plugin_flexshard.planning.tier_plan_report import EntryTiers, TiersReport
from recd_plugins.api.files import write_figure
from recd_plugins.api.pages import plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"two_tier": "tab:blue", "three_tier": "tab:orange", "joint": "tab:orange"}
_MARKERS = dict(zip(POINT_NAMES, "vs^D", strict=True))


@plot_style()
def plot(report: TiersReport, path: Path) -> None:
    """What is left of the all-to-all, and time in collectives, against memory; a row for an entry.

    Args:
        report: what to show.
        path: a file whose suffix says its format, as ``.png`` or ``.svg``.

    Raises:
        RecdError: the file cannot be written, or matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1 + 4 * len(report.entries)), layout="constrained")
    rows = figure.subplots(len(report.entries), 2, squeeze=False)
    for entry, (left, time) in zip(report.entries, rows, strict=True):
        overlap = entry.plan.options.overlap
        _draw(entry, left, lambda plan: 100 * (1 - plan.a2a_reduction))
        left.set(ylabel="all-to-all of all ranks left, %", ylim=(-3, 103))
        _draw(entry, time, lambda plan, share=overlap: plan.seconds.exposed(share) * 1e3)  # type: ignore[misc]
        time.set(ylabel=f"collectives of a step at {overlap:.0%} overlap, ms")
        time.set_ylim(0, 1.1e3 * _highest(entry))
        left.set_title(f"{entry.field}: {entry.plugin}")
        time.legend(fontsize="small")
    spec = report.spec
    figure.suptitle(
        f"{spec.nodes:,} x {spec.ranks_per_node:,} ranks of {report.topology}, "
        f"{report.batch_size:,} rows a rank"
    )
    write_figure(path, figure, dpi=120)


def _highest(entry: EntryTiers) -> float:
    """Seconds that the picture shows: all, but not far more than row-wise and the plan take."""
    overlap = entry.plan.options.overlap
    shown = (entry.plan.row_wise_seconds.exposed(overlap), entry.plan.seconds.exposed(overlap))
    drawn = (plan.seconds.exposed(overlap) for curve in entry.curves.values() for plan in curve)
    return min(max(*shown, *drawn), 3 * max(shown))


def _draw(entry: EntryTiers, axes: Axes, height: Callable[[TierPlan], float]) -> None:
    from matplotlib.ticker import LogLocator

    def memory(plan: TierPlan) -> float:
        return plan.memory_bytes / entry.plan.row_wise_memory_bytes

    for strategy, curve in entry.curves.items():
        axes.plot(
            [memory(plan) for plan in curve],
            [height(plan) for plan in curve],
            color=_COLORS[strategy],
            label=words(strategy),
        )
    row_wise = entry.curves["two_tier"][0]
    axes.plot(memory(row_wise), height(row_wise), "ko", label="row-wise")
    for name, plan in entry.points.items():
        axes.plot(
            memory(plan),
            height(plan),
            _MARKERS[name],
            color=_COLORS["two_tier"],
            markerfacecolor="white",
            label=POINT_NAMES[name],
        )
    axes.plot(memory(entry.plan), height(entry.plan), "r*", markersize=14, label="the plan")
    axes.axvline(1, color="gray", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    # Few ticks, as plain numbers.
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("memory of a rank, over that of row-wise")
    axes.grid(alpha=0.3)
