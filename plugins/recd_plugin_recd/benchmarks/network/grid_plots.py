"""All cells in one picture, and predicted steps beside measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from math import isnan, nan
from pathlib import Path
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from recd_plugin_recd.benchmarks.network.figures import HEADINGS
from recd_plugin_recd.benchmarks.network.summary import PREDICTED_WITHIN
from recd_plugins.testing.svg import COLORS, GREY, write_svg

_STEP, _SPEEDUP, _PREDICTED = map(
    HEADINGS.index, ("ms a step", "stock's best over it", "predicted, ms")
)
#: Speedups by side and cell.
_Grid = Mapping[str, Mapping[str, float]]


def draw_grid(tables: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write both pictures, that of cells where there are several; their paths.

    Args:
        tables: one a cell, whose title is its name, as ``CellFigures.table`` makes them.
        folder: where they go.
    """
    speedups: dict[str, dict[str, float]] = {}
    steps: dict[str, list[tuple[float, float]]] = {}
    for table in tables:
        for row in table["rows"]:
            speedups.setdefault(row[0], {})[table["title"]] = row[_SPEEDUP]
            if row[_PREDICTED] != "":
                rate = table["title"].rpartition(" ")[2]
                steps.setdefault(rate, []).append((row[_PREDICTED], row[_STEP]))
    paths = []
    if len(tables) > 1:
        paths.append(folder / "network_grid.svg")
        cells = [table["title"] for table in tables]
        height = 1.6 + 0.2 * len(speedups)
        write_svg(paths[-1], height, partial(_draw_speedups, speedups, cells))
    if steps:
        paths.append(folder / "network_predicted.svg")
        write_svg(paths[-1], 6, partial(_draw_steps, steps))
    return paths


def _draw_speedups(speedups: _Grid, cells: Sequence[str], figure: Figure) -> None:
    """Sides from the fastest to the slowest; what was not measured is blank."""
    sides = sorted(speedups, key=lambda side: -statistics.median(speedups[side].values()))
    values = [[speedups[side].get(cell, nan) for cell in cells] for side in sides]
    furthest = max(2.0, *(max(v, 1 / v) for each in speedups.values() for v in each.values()))
    axes = figure.subplots()
    axes.pcolormesh(values, cmap="RdBu", norm=LogNorm(1 / furthest, furthest))
    for row, column in product(range(len(sides)), range(len(cells))):
        if not isnan(value := values[row][column]):
            dark = max(value, 1 / value) > furthest**0.7
            at = (column + 0.5, row + 0.5)
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6}
            axes.text(*at, f"{value:.2g}", color="white" if dark else "black", **style)
    axes.set_xticks([n + 0.5 for n in range(len(cells))], cells, rotation=90, fontsize=7)
    axes.set_yticks([n + 0.5 for n in range(len(sides))], sides, fontsize=7)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_title("step of stock's best over that of a side", loc="left")


def _draw_steps(steps: Mapping[str, Sequence[tuple[float, float]]], figure: Figure) -> None:
    axes = figure.subplots()
    every = [value for pairs in steps.values() for pair in pairs for value in pair]
    ends = [0.8 * min(every), 1.25 * max(every)]
    low, high = ([end * by for end in ends] for by in (1 / PREDICTED_WITHIN, PREDICTED_WITHIN))
    axes.fill_between(ends, low, high, color=GREY, alpha=0.3, label=f"within {PREDICTED_WITHIN:g}")
    for number, (rate, pairs) in enumerate(steps.items()):
        predicted, measured = zip(*pairs, strict=True)
        color = COLORS[number % len(COLORS)]
        axes.scatter(predicted, measured, s=14, color=color, label=rate)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="predicted, ms",
        ylabel="measured, ms",
    )
    axes.set_title("steps of all cells and sides", loc="left")
    axes.legend(frameon=False, fontsize=8)
