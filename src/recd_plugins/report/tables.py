"""Tables for the terminal, in a common style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def text_table(
    title: str,
    texts: Sequence[str],
    numbers: Sequence[str] = (),
    rows: Iterable[Iterable[str]] = (),
    *,
    caption: str | None = None,
) -> Table:
    """Return a rich table with narrow columns. Long cells wrap, so that it fits 80 characters.

    Args:
        title: shown above the table; empty for none.
        texts: headings of the first columns, aligned left.
        numbers: headings of the other columns, aligned right.
        rows: cells of each row.
        caption: shown below the table.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
