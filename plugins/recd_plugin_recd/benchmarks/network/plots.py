"""Step times by rate, drawn from a report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recd_plugin_recd.benchmarks.network.figures import HEADINGS
from recd_plugin_recd.benchmarks.network.grid_plots import draw_grid
from recd_plugins.testing.svg import COLORS, write_svg

_MOST_SIDES = 12


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write pictures, and their paths.

    Bars of sides by rate, one for each workload and nodes; the grid of all cells and sides; and
    predicted steps beside measured ones, where there are any.
    """
    cells: dict[str, dict[str, dict[str, float]]] = {}
    tables = [each for each in result["details"] if each["headings"] == HEADINGS and each["rows"]]
    for detail in tables:
        where, _, rate = detail["title"].rpartition(" ")
        cells.setdefault(where, {})[rate] = {row[0]: row[1] for row in detail["rows"]}
    paths = []
    for where, rates in cells.items():
        paths.append(folder / f"network_{where.replace(' ', '_')}.svg")
        sides = list(next(iter(rates.values())))[:_MOST_SIDES]
        height = 1 + 0.22 * len(sides) * len(rates)
        write_svg(paths[-1], height, partial(_draw, where, rates, sides))
    return [*paths, *draw_grid(tables, folder)]


def _draw(where: str, rates: dict[str, dict[str, float]], sides: list[str], figure: Figure) -> None:
    axes = figure.subplots()
    width = 0.8 / len(rates)
    for number, (rate, steps) in enumerate(rates.items()):
        places = [side + number * width for side in range(len(sides))]
        values = [steps.get(side, 0.0) for side in sides]
        color = COLORS[number % len(COLORS)]
        bars = axes.barh(places, values, height=width, color=color, label=rate)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set_yticks([side + 0.4 - width / 2 for side in range(len(sides))], sides)
    axes.set_xscale("log")
    axes.set_xlabel("ms a step")
    axes.invert_yaxis()
    axes.set_title(where, loc="left")
    axes.legend(frameon=False, fontsize=8)
