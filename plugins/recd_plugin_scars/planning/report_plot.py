"""The report of ``recd plan --cache`` as a picture."""

from __future__ import annotations

from pathlib import Path

from recd_plugin_scars.planning.cache_plan_report import CachePlanReport
from recd_plugins.api.files import write_figure
from recd_plugins.api.pages import plot_style


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
