"""Trace profiles: those of several tables, from one source, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recd_plugin_dlrm.trace.distances import StackDistances
from recd_plugin_dlrm.trace.sources import TraceRows
from recd_plugin_dlrm.trace.table_trace import TableTrace
from recd_plugins.api import DataError


@dataclass(frozen=True, eq=False)
class TraceProfile:
    """What is known of the traces of tables.

    Attributes:
        tables: by name.
        source: what was profiled, in words.
        path: the file that it was read from.
    """

    tables: Mapping[str, TableTrace]
    source: str
    path: Path | None = None


def profile_pieces(
    pieces: Iterable[TraceRows],
    features: Sequence[str],
    source: str,
    progress: Callable[[int], None] = lambda _rows: None,
) -> TraceProfile:
    """Profile the traces of ``features``; each has a table of its own.

    Args:
        pieces: of the data, in order.
        source: what they are of, in words.
        progress: told after each piece how many rows it had.

    Raises:
        DataError: a feature has no ids at all.
    """
    found = {name: StackDistances() for name in features}
    rows = 0
    for piece in pieces:
        for name, distances in found.items():
            distances.add(piece.ids[name])
        rows += piece.rows
        progress(piece.rows)
    for name, distances in found.items():
        if not distances.accesses:
            raise DataError(
                f"{source}: feature {name} has no ids in {rows:,} rows; leave it out with --tables"
            )
    traces = [distances.trace(name, rows) for name, distances in found.items()]
    return TraceProfile({trace.table: trace for trace in traces}, source)
