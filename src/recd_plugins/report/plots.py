"""Common colors and style of matplotlib plots."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from recd_plugins.report.html_page import Html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours of variants or parts.
COLORS = ("#2563a8", "#d9822b", "#3a8f5c", "#8a5fb0", "#b6bcc6")
#: All colours of the cycle.
ALL_COLORS = (*COLORS, "#c25b6a", "#7fa8d4", "#e8c15a")
#: Colour of the baseline.
GREY = COLORS[-1]

# Figures of 7 inches are readable in 500 pixels.
_STYLE: Any = {
    "font.size": 12,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "grid.color": "#e6e8ec",
    "legend.frameon": False,
    "svg.hashsalt": "recd",
    "svg.fonttype": "none",
    # Names may contain dollar signs, which matplotlib would parse as math.
    "text.parse_math": False,
}


@contextmanager
def plot_style() -> Iterator[None]:
    """Apply the common matplotlib style within this context. Also works as a decorator."""
    import matplotlib
    from cycler import cycler

    colors = cycler(color=ALL_COLORS)
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": colors}):
        yield


def svg_of(figure: Figure) -> Html:
    """Return a matplotlib figure as SVG for an HTML page. Equal figures give equal text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return Html("".join(text.getvalue().partition("<svg")[1:]))
