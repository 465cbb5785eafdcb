"""Builds HTML pages that contain their style sheet and images."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# Cell texts with a background colour.
_MARKS = frozenset({"exact", "partial", "plain"})
_STYLE = """
body { max-width: 56rem; margin: 2.5rem auto; padding: 0 1rem; color: #1d2530; background: #fff;
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
p.note { color: #566070; } figure { margin: 1rem 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; font-family: system-ui, sans-serif; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .22rem .7rem; text-align: right; border-bottom: 1px solid #e6e8ec; }
td:not(:first-child), th { white-space: nowrap; }
th { vertical-align: bottom; color: #566070; font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
td:first-child { min-width: 8rem; } td.exact { color: #2563a8; font-weight: 600; }
td.partial { color: #b3621a; font-weight: 600; } td.plain { color: #8a93a1; }
details { margin-top: 1.2rem; } summary { cursor: pointer; font-weight: 600; }
pre { background: #f5f6f8; padding: 1rem; overflow-x: auto; font-size: .86rem; }
"""


class Html(str):
    """A string of HTML markup. ``element`` escapes plain strings, but not ``Html``."""

    __slots__ = ()


def element(tag: str, *children: str, css: str = "") -> Html:
    """Return an HTML element. Children are escaped unless they are ``Html``."""
    attribute = f' class="{escape(css)}"' if css else ""
    return Html(f"<{tag}{attribute}>{_inside(children)}</{tag}>")


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return the text of an HTML page. Body ``parts`` are escaped unless they are ``Html``."""
    body = _inside(parts, "\n")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{element('title', title)}\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def html_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Html:
    """Return an HTML table that scrolls horizontally if it is too wide for the page."""
    head = element("tr", *(element("th", heading) for heading in headings))
    lines = (
        element("tr", *(element("td", cell, css=cell if cell in _MARKS else "") for cell in row))
        for row in rows
    )
    body = element("tbody", Html("\n".join(lines)))
    return element("div", element("table", element("thead", head), body), css="scroll")


def html_section(heading: str, text: str, plot: Html) -> tuple[Html, Html, Html]:
    """Return the three HTML elements of a section: heading, paragraph and figure."""
    return element("h2", heading), element("p", text), element("figure", plot)


def _inside(children: Iterable[str], between: str = "") -> str:
    return between.join(each if isinstance(each, Html) else escape(each) for each in children)
