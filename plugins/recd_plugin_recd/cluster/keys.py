"""The order of a clustered table: by session, then by time, ties in the order of the input."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_recd.source import SessionTable
from recd_plugins.api import DataError, Rows, SessionKeys


@dataclass(frozen=True)
class Cut:
    """A place in the order: before all rows of ``session``, or within a session that is huge.

    Attributes:
        time: None for the start of the session; else the cut is before the rows of that time
            whose number in the input is ``row`` or more.
    """

    session: int | str | bytes
    time: int | float | None = None
    row: int = 0


@dataclass(frozen=True)
class Keys:
    """Sessions and times of some rows as numbers that sort as they do.

    Attributes:
        sessions: ``[rows]``; strings are numbered in their order.
        times: ``[rows]``.
        names: the string behind each number of ``sessions``; None where sessions are integers.
    """

    sessions: NDArray[Any]
    times: NDArray[Any]
    names: list[str | bytes] | None

    @classmethod
    def of(cls, sessions: Any, times: Any) -> Keys:
        """The keys of two Arrow arrays without nulls."""
        names = None
        if pt.is_integer(sessions.type):
            numbers = sessions.to_numpy()
        else:
            encoded = _plain(sessions).dictionary_encode()
            if isinstance(encoded, pa.ChunkedArray):
                encoded = encoded.combine_chunks()
            order = pc.sort_indices(encoded.dictionary).to_numpy()
            ranks = np.empty(len(order), np.int64)
            ranks[order] = np.arange(len(order))
            numbers = ranks[encoded.indices.to_numpy()]
            names = encoded.dictionary.take(pa.array(order)).to_pylist()
        return cls(numbers, time_numbers(times), names)

    def __len__(self) -> int:
        return len(self.sessions)

    def order(self) -> NDArray[np.int64]:
        """The rows by session, then by time, then by row."""
        return np.lexsort((self.times, self.sessions))

    def take(self, order: NDArray[np.int64]) -> Keys:
        """The keys of the rows in ``order``, in that order."""
        return Keys(self.sessions[order], self.times[order], self.names)

    def session(self, row: int) -> int | str | bytes:
        """The session of one row."""
        number = int(self.sessions[row])
        return number if self.names is None else self.names[number]

    def cut_before(self, row: int, number: int) -> Cut:
        """The cut between ``row`` and the one before it; ``number`` is its row in the input."""
        return Cut(self.session(row), self.times[row].item(), number)

    def position(self, cut: Cut, numbers: NDArray[np.int64]) -> int:
        """How many of these rows, which are in order, are before ``cut``.

        Args:
            numbers: the number of each row in the input, ``[rows]``.
        """
        first, last = self._rows_of(cut.session)
        if cut.time is None:
            return first
        time = self.times.dtype.type(cut.time)
        times = self.times[first:last]
        first, last = (first + int(np.searchsorted(times, time, side)) for side in _SIDES)
        return first + int(np.searchsorted(numbers[first:last], cut.row))

    def _rows_of(self, session: int | str | bytes) -> tuple[int, int]:
        if self.names is None:
            number = self.sessions.dtype.type(session)
            first, last = (int(np.searchsorted(self.sessions, number, side)) for side in _SIDES)
            return first, last
        rank = bisect_left(self.names, session)
        there = rank < len(self.names) and self.names[rank] == session
        first, last = np.searchsorted(self.sessions, [rank, rank + there])
        return int(first), int(last)


_SIDES: tuple[Any, Any] = ("left", "right")


def check_columns(source: SessionTable) -> None:
    """Refuse sessions and times of types that cannot be sorted.

    Raises:
        DataError: with the column and its type.
    """
    keys, files = source.keys, source.partitions[0].files
    path = files[0] if files else source.path
    if keys.session == keys.timestamp:
        raise DataError(f"{path}: {keys.session!r} cannot be both the session and the time")
    kind = _plain_type(source.schema.field(keys.session).type)
    if not (pt.is_integer(kind) or _is_string(kind)):
        raise DataError(
            f"{path}: column {keys.session!r} is {kind}; a session is an integer or a string"
        )
    kind = source.schema.field(keys.timestamp).type
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_timestamp(kind)):
        raise DataError(
            f"{path}: column {keys.timestamp!r} is {kind}; a time is a timestamp or a number"
        )


def check_values(rows: Rows, keys: SessionKeys) -> None:
    """Refuse rows whose session or time is null, or whose time is no number.

    Raises:
        DataError: with the file and row of the first of them.
    """
    for name in (keys.session, keys.timestamp):
        column = rows.data.column(name)
        if column.null_count:
            row = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
            raise DataError(
                f"{_place(rows, row)}, column {name!r}: null; every row needs a session and a time"
            )
    times = rows.data.column(keys.timestamp)
    if pt.is_floating(times.type):
        missing = np.isnan(times.to_numpy())
        if missing.any():
            raise DataError(
                f"{_place(rows, int(missing.argmax()))}, column {keys.timestamp!r}: NaN; every row "
                "needs a time"
            )


def _place(rows: Rows, row: int) -> str:
    path, number = rows.origin_of(row)
    return f"{path}: row {number} (from 0)"


def time_numbers(times: Any) -> NDArray[Any]:
    """Times as numbers in their order; timestamps in their unit since 1970."""
    if pt.is_timestamp(times.type):
        times = times.cast(pa.int64())
    numbers: NDArray[Any] = times.to_numpy()
    return numbers


def _plain(sessions: Any) -> Any:
    kind = _plain_type(sessions.type)
    return sessions if kind == sessions.type else sessions.cast(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pt.is_dictionary(kind) else kind


def _is_string(kind: pa.DataType) -> bool:
    return (
        pt.is_string(kind)
        or pt.is_large_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_binary(kind)
    )
