"""The report of ``recd plan --scaling``, in a terminal and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_tuning.scaling import STOCK, Scaling, ScalingReport
from recd_plugins.api import GREY, plot_style, topology_line, write_figure


def render(report: ScalingReport) -> RenderableType:
    """The topology, and milliseconds of a step of every side, by ranks."""
    measured = "costs measured" if report.spec.costs else "least times, and a wait a collective"
    return Group(
        topology_line(report.topology, report.spec),
        f"predicted ms of a step; {measured}",
        "",
        *(_table(report, kind) for kind in report.points),
        *_problems(report),
        *(
            Text(
                f"{name} has other features or tables than the first: its step is of another model"
            )
            for name in report.other_models
        ),
    )


def _problems(report: ScalingReport) -> Iterator[Text]:
    """Why a side has no plan, the first time that it has none."""
    for kind, sides in report.points.items():
        for name, points in sides.items():
            for point in points:
                if point.problem is not None:
                    said = f"{name}, {kind}, {point.ranks:,} ranks: {point.problem}"
                    if kind == "strong":
                        said += f" (of --global-batch {report.global_batch:,})"
                    yield Text(said)
                    break


def _words(report: ScalingReport, kind: Scaling) -> str:
    if kind == "weak":
        return f"weak: {report.batch_size:,} rows a rank"
    return f"strong: {report.global_batch:,} rows of all ranks"


def _table(report: ScalingReport, kind: Scaling) -> Table:
    table = Table(title=_words(report, kind), title_justify="left", box=SIMPLE_HEAD)
    sides = report.points[kind]
    for heading in ("ranks", "rows a rank", *sides):
        table.add_column(heading, justify="right", overflow="fold")
    for points in zip(*sides.values(), strict=True):
        times = (point.milliseconds for point in points)
        table.add_row(
            f"{points[0].ranks:,}",
            f"{points[0].batch_size:,}",
            *("no plan" if each is None else f"{each:,.2f}" for each in times),
        )
    return table


@plot_style()
def plot(report: ScalingReport, path: Path) -> None:
    """Milliseconds of a step by ranks, of both kinds of scaling; what has no plan is left out.

    Args:
        report: what to show.
        path: a file whose suffix says its format, as ``.png`` or ``.svg``.

    Raises:
        RecdError: the file cannot be written, or matplotlib knows no such format.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, (kind, sides) in zip(figure.subplots(1, 2), report.points.items(), strict=True):
        for name, points in sides.items():
            shown = [(each.ranks, ms) for each in points if (ms := each.milliseconds) is not None]
            color = {"color": GREY} if name == STOCK else {}
            axes.plot(*zip(*shown, strict=True), marker="o", markersize=4, label=name, **color)
        ranks = [each.ranks for each in next(iter(sides.values()))]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [f"{each:,}" for each in ranks], fontsize="small", rotation=45)
        axes.set(title=_words(report, kind), xlabel="ranks", ylabel="ms of a step")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
    axes.legend()
    figure.suptitle(f"{report.topology}, predicted")
    write_figure(path, figure)
