"""Pages of HTML that need nothing else, in one style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Words that a cell may be alone, which say how it is coloured.
_MARKS = frozenset({"exact", "partial", "plain"})
_STYLE = """
body { max-width: 56rem; margin: 2.5rem auto; padding: 0 1rem; color: #1d2530; background: #fff;
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
p.note { color: #566070; } figure { margin: 1rem 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; font-family: system-ui, sans-serif; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .22rem .7rem; text-align: right; border-bottom: 1px solid #e6e8ec; }
td:not(:first-child) { white-space: nowrap; }
th { vertical-align: bottom; color: #566070; font-weight: 600; }
th:first-child, td:first-child { text-align: left; } td.exact { color: #2563a8; font-weight: 600; }
td.partial { color: #b3621a; font-weight: 600; } td.plain { color: #8a93a1; }
pre { background: #f5f6f8; padding: 1rem; overflow-x: auto; font-size: .86rem; }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """The text of a page whose body are ``parts``, HTML; the title is text."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts that scrolls by itself where it is too wide; the first column is names."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td{_class(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _class(cell: str) -> str:
    return f' class="{cell}"' if cell in _MARKS else ""
