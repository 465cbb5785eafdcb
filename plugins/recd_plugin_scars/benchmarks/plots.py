"""What is moved, drawn from a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recd_plugin_scars.benchmarks.cells import BYTES_TABLE
from recd_plugin_scars.benchmarks.theory import MORE_TRAFFIC_TABLE, TRAFFIC_TABLE
from recd_plugins.api import RecdError
from recd_plugins.testing.svg import COLORS, GREY, write_svg

Drawing = Callable[[Axes, dict[str, Any]], None]


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``theory.svg`` and ``backing_store.svg``, as far as the report has them; their paths.

    Raises:
        RecdError: it has neither.
    """
    details = {detail["title"]: detail for detail in result["details"]}
    if TRAFFIC_TABLE in details:
        once, more = details[TRAFFIC_TABLE], details.pop(MORE_TRAFFIC_TABLE)
        rows = [[*row, *again[1:]] for row, again in zip(once["rows"], more["rows"], strict=True)]
        details[TRAFFIC_TABLE] = {**once, "rows": rows}
    plots = {
        TRAFFIC_TABLE: ("theory.svg", _draw_theory),
        BYTES_TABLE: ("backing_store.svg", _draw_bytes),
    }
    paths = []
    for title in (title for title in plots if title in details):
        detail, (name, draw_one) = details[title], plots[title]
        paths.append(folder / name)
        write_svg(paths[-1], 1 + 0.3 * len(detail["rows"]), partial(_draw, draw_one, detail))
    if not paths:
        raise RecdError(
            "--plot draws what is moved, which --theory and --only traffic find: leave --only out"
        )
    return paths


def _draw(draw_one: Drawing, detail: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots()
    draw_one(axes, detail)
    axes.invert_yaxis()


def _draw_theory(axes: Axes, detail: dict[str, Any]) -> None:
    """Of each distribution, what is moved over the plain path at 1x."""
    rows = detail["rows"]
    for number, (kind, color) in enumerate(zip(detail["headings"][2:5], COLORS, strict=False)):
        for at, filled in ((2, True), (6, False)):
            shares = [max(float(row[at + number]) / float(row[1]), 1e-6) for row in rows]
            axes.plot(
                shares,
                range(len(rows)),
                marker="o",
                linestyle="none",
                color=color,
                markerfacecolor=color if filled else "none",
                label=f"{kind}, 1x" if filled else f"{kind}, 5x rows and batch",
            )
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_xscale("log")
    axes.set_xlabel("moved for a batch, over the plain path at 1x")
    axes.legend(frameon=False, fontsize=8)


def _draw_bytes(axes: Axes, detail: dict[str, Any]) -> None:
    """Of each side, MB that were counted and predicted."""
    rows = [row for row in detail["rows"] if row[1] != ""]
    for number, (label, color) in enumerate((("counted", COLORS[0]), ("predicted", GREY))):
        places = [place - 0.2 + 0.4 * number for place in range(len(rows))]
        values = [
            float(row[1]) + float(row[2]) if number == 0 else float(row[3] or 0) for row in rows
        ]
        bars = axes.barh(places, values, height=0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_xscale("log")
    axes.set_xlabel("MB of the backing store in a step")
    axes.legend(frameon=False, fontsize=8)
