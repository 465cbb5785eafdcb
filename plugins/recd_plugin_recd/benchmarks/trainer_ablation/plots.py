"""Figures 8 and 9 of the paper, drawn from a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recd_plugins.testing.svg import COLORS, write_svg

Drawing = Callable[[Axes, dict[str, Any]], None]
_SPEEDUP, _STAGES = 2, slice(4, None)


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``figure_8.svg``, time by stage, and ``figure_9.svg``, throughput; their paths."""
    times = [detail for detail in result["details"] if detail["title"].endswith(": time")]
    plots: dict[str, Drawing] = {
        "figure_8.svg": _draw_stages,
        "figure_9.svg": _draw_throughput,
    }
    paths = []
    for name, draw_one in plots.items():
        paths.append(folder / name)
        write_svg(paths[-1], 0.6 + 2.6 * len(times), partial(_draw, draw_one, times))
    return paths


def _draw(draw_one: Drawing, times: Sequence[dict[str, Any]], figure: Figure) -> None:
    grid = figure.subplots(len(times), squeeze=False)
    for axes, detail in zip(grid[:, 0], times, strict=True):
        draw_one(axes, detail)
        axes.set_title(detail["title"].partition(":")[0], loc="left")
        axes.invert_yaxis()


def _draw_stages(axes: Axes, detail: dict[str, Any]) -> None:
    """Milliseconds a step, or of as many samples where the batch is larger."""
    rows = detail["rows"]
    scales = [float(rows[0][1]) / float(row[1]) for row in rows]
    left = [0.0] * len(rows)
    stages = list(zip(*(row[_STAGES] for row in rows), strict=True))
    for name, values, color in zip(detail["headings"][_STAGES], stages, COLORS, strict=True):
        widths = [value * scale for value, scale in zip(values, scales, strict=True)]
        axes.barh([row[0] for row in rows], widths, left=left, color=color, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("ms for the samples of a step of the baseline")
    axes.legend(frameon=False, fontsize=8)


def _draw_throughput(axes: Axes, detail: dict[str, Any]) -> None:
    names, values = zip(*((row[0], row[_SPEEDUP]) for row in detail["rows"]), strict=True)
    bars = axes.barh(names, values, color=COLORS[0])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.set_xlabel("samples a second over the baseline")
