"""Access profiles as a table, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from recd_plugins.api import AccessProfile, TableAccess, plot_style, write_figure

_TOPS = {"0.1 %": 0.001, "1 %": 0.01, "10 %": 0.1}
_MOST_CURVES = 12
_POINTS = 200


def as_json(profile: AccessProfile) -> dict[str, Any]:
    """What ``render`` shows and more, as JSON values."""
    return {
        "source": profile.source,
        "tables": {name: _figures(table) for name, table in profile.tables.items()},
    }


def render(profile: AccessProfile) -> RenderableType:
    """A line a table: its rows, what a sample reads, and how much the most read rows have."""
    lines = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    lines.add_column("table", overflow="fold")
    deduplicated = {
        table.counted for table in profile.tables.values() if table.batch_size is not None
    }
    factor = ("f",) if deduplicated else ()
    for name in ("rows", "unread", "samples", "L", *factor, *_TOPS, "error"):
        lines.add_column(name, justify="right", no_wrap=True)
    for name, table in profile.tables.items():
        figures = _figures(table)
        unread = figures["unread_rows"]
        lines.add_row(
            name,
            f"{table.num_embeddings:,}",
            "-" if unread is None else f"{unread:,}",
            f"{table.samples:,}",
            f"{table.length:.4g}",
            *([f"{table.dedupe_factor:.4g}"] if factor else ()),
            *(f"{100 * share:.1f} %" for share in figures["share_of_accesses"].values()),
            f"{table.error:.4g}" if table.error else "exact",
        )
    legend = (
        "rows: of the table; unread: of them never read; L: accesses of a sample; "
        f"{', '.join(_TOPS)}: share of accesses that the most read so many rows have."
    )
    if deduplicated:
        legend += (
            f" Counted are {' and '.join(sorted(deduplicated))}, which alone are sent (L is of all "
            "rows); f: accesses of all rows over these, 1 where nothing is deduplicated."
        )
    if any(table.error for table in profile.tables.values()):
        legend += (
            " error: a count may be so much too low, as more rows are read than were counted one "
            "by one; --bound raises their number."
        )
    return Group(f"Access profile of {profile.source}", lines, legend)


def _figures(table: TableAccess) -> dict[str, Any]:
    read = int(np.count_nonzero(table.accesses))
    return {
        "features": list(table.features),
        "num_embeddings": table.num_embeddings,
        "samples": table.samples,
        "accesses": table.total,
        "length": table.length,
        "known_rows": len(table.rows),
        "unread_rows": None if table.error else table.num_embeddings - read,
        "share_of_accesses": {
            name: table.covered(max(1, round(share * table.num_embeddings)))
            for name, share in _TOPS.items()
        },
        "error": table.error,
        "dedupe_factor": table.dedupe_factor,
        "batch_size": table.batch_size,
    }


@plot_style()
def plot(profile: AccessProfile, path: Path) -> None:
    """The share of accesses by the share of a table's rows, most read first.

    Of the tables the most read are drawn.

    Args:
        profile: what to show.
        path: a file whose suffix says its format, as ``.png`` or ``.svg``.

    Raises:
        RecdError: the file cannot be written, or matplotlib knows no such format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    tables = sorted(profile.tables.values(), key=lambda table: -table.length)
    for table in tables[:_MOST_CURVES]:
        shares, covered = coverage(table)
        axes.plot(100 * shares, 100 * covered, label=f"{table.table} (L {table.length:.3g})")
    axes.set(
        xscale="log",
        xlabel="rows of the table, most read first (%)",
        ylabel="share of accesses (%)",
        ylim=(0, 101),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    write_figure(path, figure)


def coverage(table: TableAccess) -> tuple[np.ndarray, np.ndarray]:
    """Points of the curve: shares of the table's rows, and the share of accesses they have."""
    rows = np.unique(np.geomspace(1, table.num_embeddings, _POINTS).round().astype(np.int64))
    sums = np.concatenate([[0.0], np.cumsum(table.accesses)])
    known = np.minimum(rows, len(table.rows))
    covered = sums[known]
    if table.tail_rows:
        covered += table.tail_accesses * (rows - known) / table.tail_rows
    return rows / table.num_embeddings, covered / max(table.total, np.finfo(float).tiny)
