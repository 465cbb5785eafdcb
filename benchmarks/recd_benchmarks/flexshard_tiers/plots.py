"""Bytes by tier, observed and predicted, drawn from a report."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from recd_benchmarks.flexshard_tiers.one_table_figures import TIER_TABLE
from recd_plugins.errors import RecdError
from recd_plugins.files import write_text

_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "recd",
    "svg.fonttype": "none",
}
_BARS = (("observed", 2, "#2563a8"), ("predicted", 3, "#b6bcc6"))


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``bytes_by_tier.svg``; its path.

    Raises:
        RecdError: the report has no such table, as with ``--only`` of another part.
    """
    tables = [detail for detail in result["details"] if detail["title"] == TIER_TABLE]
    if not tables:
        raise RecdError("--plot draws bytes by tier, which --only rm2 measures: leave --only out")
    rows = tables[0]["rows"]
    names = [row[0] for row in rows]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, 0.8 + 0.4 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for number, (label, column, color) in enumerate(_BARS):
            places = [row - 0.2 + 0.4 * number for row in range(len(rows))]
            values = [float(row[column]) for row in rows]
            axes.barh(places, values, height=0.38, color=color, label=label)
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlabel("kB that a rank sends in a step")
        axes.set_title("a table like RM-2's on 4 nodes of 2 ranks", loc="left")
        axes.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    path = folder / "bytes_by_tier.svg"
    write_text(path, text.getvalue())
    return [path]
