"""Bytes by tier, observed and predicted, drawn from a report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recd_plugin_flexshard.benchmarks.one_table_figures import TIER_TABLE
from recd_plugins.api import RecdError
from recd_plugins.testing.svg import COLORS, GREY, write_svg

_BARS = (("observed", 2, COLORS[0]), ("predicted", 3, GREY))


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``bytes_by_tier.svg``; its path.

    Raises:
        RecdError: the report has no such table, as with ``--only`` of another part.
    """
    tables = [detail for detail in result["details"] if detail["title"] == TIER_TABLE]
    if not tables:
        raise RecdError("--plot draws bytes by tier, which --only rm2 measures: leave --only out")
    rows = tables[0]["rows"]
    path = folder / "bytes_by_tier.svg"
    write_svg(path, 0.8 + 0.4 * len(rows), partial(_draw, rows))
    return [path]


def _draw(rows: Sequence[Sequence[Any]], figure: Figure) -> None:
    axes = figure.subplots()
    for number, (label, column, color) in enumerate(_BARS):
        places = [row - 0.2 + 0.4 * number for row in range(len(rows))]
        values = [float(row[column]) for row in rows]
        axes.barh(places, values, height=0.38, color=color, label=label)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("kB that a rank sends in a step")
    axes.set_title("a table like RM-2's on 4 nodes of 2 ranks", loc="left")
    axes.legend(frameon=False, fontsize=8)
