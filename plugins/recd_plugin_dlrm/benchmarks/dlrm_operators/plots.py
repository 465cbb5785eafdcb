"""The paper's figure 6, drawn from a report: time of a step by part of the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recd_plugins.testing.svg import write_svg

_COLORS = ("#2563a8", "#7fa8d4", "#d9822b", "#3a8f5c", "#8a5fb0", "#c25b6a", "#b6bcc6")


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``figure_6.svg``, a bar a program; its path."""
    path = folder / "figure_6.svg"
    write_svg(path, 1 + 1.6 * len(result["details"]), partial(_draw, result["details"]))
    return [path]


def _draw(details: list[dict[str, Any]], figure: Figure) -> None:
    subplots = figure.subplots(len(details), squeeze=False)[:, 0]
    for axes, detail in zip(subplots, details, strict=True):
        names = [row[0] for row in detail["rows"]]
        left = [0.0] * len(names)
        parts = zip(*(row[1:-1] for row in detail["rows"]), strict=True)
        for part, values, color in zip(detail["headings"][1:-1], parts, _COLORS, strict=True):
            axes.barh(names, values, left=left, color=color, label=part)
            left = [start + value for start, value in zip(left, values, strict=True)]
        axes.set_title(detail["title"].partition(":")[0], loc="left")
        axes.set_xlabel("ms of a profiled step")
        axes.invert_yaxis()
    handles, labels = subplots[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside upper center")
