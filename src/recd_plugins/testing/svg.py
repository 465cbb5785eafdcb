"""Pictures of reports: one style, and files that are the same for the same report."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from recd_plugins.files import write_text
from recd_plugins.plots import COLORS, GREY, plot_style

__all__ = ["COLORS", "GREY", "write_svg"]


@plot_style()
def write_svg(path: Path, height: float, draw: Callable[[Figure], None]) -> None:
    """Write what ``draw`` draws into a figure of 8 by ``height`` inches.

    Raises:
        RecdError: the file cannot be written.
    """
    figure = Figure(figsize=(8, height), layout="constrained")
    draw(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path, text.getvalue())
