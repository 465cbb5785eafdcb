"""Histories: the ids that a column had in earlier rows of the same session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from recd_plugin_tables.leaves import list_parts
from recd_plugin_tables.plan import ROW, SESSION, TIME
from recd_plugins.api import PluginOptions


class HistoryOptions(PluginOptions):
    """A feature that lists the ids of a column in earlier rows of the session."""

    of: str = Field(description="Column of the ids; columns uses it as id.")
    last: PositiveInt = Field(
        default=50, description="Maximum number of rows; the latest are kept."
    )
    ties: Literal["apart", "stored"] = Field(
        default="apart",
        description="Rows of a session with equal times. apart: neither is in the history of the "
        "other. stored: the row that comes first in the table is the earlier one.",
    )


class Histories:
    """Builds the histories of rows that are sorted by session and time.

    Args:
        rows: all rows of each session in it, with the columns of the import.
        options: histories by name; ``of`` is the name of a feature here.
    """

    def __init__(self, rows: pa.Table, options: Mapping[str, HistoryOptions]) -> None:
        session, time, row = (rows[name].to_numpy() for name in (SESSION, TIME, ROW))
        new_session = _changes(session)
        # Candidates of one row of the table are never in each other's history.
        later = {"apart": _changes(time), "stored": _changes(row)}
        self._spans: dict[str, tuple[pa.Array, NDArray[np.int32], NDArray[np.int32]]] = {}
        for name, option in options.items():
            offsets, ids, _ = list_parts(rows[option.of].combine_chunks())
            stops = _last_true(new_session | later[option.ties])
            starts = np.maximum(_last_true(new_session), stops - option.last)
            self._spans[name] = ids, offsets[starts], offsets[stops]

    def add_to(self, rows: pa.Table, first: int) -> pa.Table:
        """Return ``rows`` with their histories; the first of them is row ``first`` of all."""
        for name, (ids, starts, stops) in self._spans.items():
            begin, end = (each[first : first + len(rows)] for each in (starts, stops))
            lengths = end - begin
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            places = np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])
            lists = pa.ListArray.from_arrays(pa.array(offsets), ids.take(pa.array(places)))
            rows = rows.append_column(name, lists)
        return rows


def _changes(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each value differs from the one before; True of the first."""
    return np.concatenate([np.ones(min(1, len(values)), bool), values[1:] != values[:-1]])


def _last_true(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The index of the last True up to each place."""
    return np.maximum.accumulate(np.where(flags, np.arange(len(flags)), 0))
