"""Pictures of reports: one style, and files that are the same for the same report."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from recd_plugins.files import write_text

#: Of sides or parts that stand next to each other.
COLORS = ("#2563a8", "#d9822b", "#3a8f5c", "#8a5fb0", "#b6bcc6")
#: Of what the others are compared with.
GREY = COLORS[-1]
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "recd",
    "svg.fonttype": "none",
}


def write_svg(path: Path, height: float, draw: Callable[[Figure], None]) -> None:
    """Write what ``draw`` draws into a figure of 8 by ``height`` inches.

    Raises:
        RecdError: the file cannot be written.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, height), layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path, text.getvalue())
