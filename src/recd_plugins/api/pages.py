"""What people look at: plots in one style, and pages of HTML that need nothing else.

For reports of commands and of table parts. Needs matplotlib where something is drawn.
"""

from recd_plugins.html_page import Html, element, html_page, html_section, html_table
from recd_plugins.plots import COLORS, GREY, plot_style, svg_of

__all__ = [
    "COLORS",
    "GREY",
    "Html",
    "element",
    "html_page",
    "html_section",
    "html_table",
    "plot_style",
    "svg_of",
]
