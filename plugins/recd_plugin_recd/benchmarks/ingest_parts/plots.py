"""Requests and over-read bytes by the limit of holes, drawn from a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recd_plugins.testing.svg import COLORS, write_svg


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``ingest.svg``; its path."""
    path = folder / "ingest.svg"
    write_svg(path, 3.2, partial(_draw, result["details"][0]["rows"]))
    return [path]


def _draw(rows: Sequence[Sequence[Any]], figure: Figure) -> None:
    axes = figure.subplots(1, 2)
    for number, order in enumerate(("schema", "popularity")):
        mine = [row for row in rows if row[1] == order]
        labels = ["per\ncolumn", *(f"{int(row[2]) >> 10}\nKiB" for row in mine[1:])]
        for each, column in ((axes[0], 3), (axes[1], 6)):
            values = [float(row[column]) for row in mine]
            each.plot(range(len(mine)), values, "o-", color=COLORS[number], label=order)
            each.set_xticks(range(len(mine)), labels, fontsize=7)
            each.set_ylim(bottom=0)
    axes[0].set_title("requests for columns", loc="left", fontsize=9)
    axes[1].set_title("bytes beyond need, %", loc="left", fontsize=9)
    axes[0].legend(frameon=False, fontsize=8, title="order of columns", title_fontsize=8)
