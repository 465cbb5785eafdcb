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
        sessions = plain_sessions(sessions)
        if pt.is_integer(sessions.type):
            numbers = sessions.to_numpy()
        else:
            encoded = sessions.dictionary_encode()
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
    if not (_is_number(kind) or pt.is_integer(kind) or is_string(kind)):
        raise DataError(
            f"{path}: column {keys.session!r} is {kind}; a session is a whole number, a string or "
            "bytes"
        )
    kind = source.schema.field(keys.timestamp).type
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_timestamp(kind)):
        raise DataError(
            f"{path}: column {keys.timestamp!r} is {kind}; a time is a timestamp or a number"
        )


def check_values(rows: Rows, keys: SessionKeys) -> None:
    """Refuse rows whose session or time is null or no number, or whose session is not whole.

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
    check_sessions(rows, keys.session)
    times = rows.data.column(keys.timestamp)
    if pt.is_floating(times.type):
        missing = np.isnan(times.to_numpy())
        if missing.any():
            raise DataError(
                f"{_place(rows, int(missing.argmax()))}, column {keys.timestamp!r}: NaN; every row "
                "needs a time"
            )


def check_sessions(rows: Rows, name: str) -> None:
    """Refuse sessions that are numbers and not whole.

    Raises:
        DataError: with the file and row of the first of them.
    """
    sessions = rows.data.column(name)
    try:
        plain_sessions(sessions)
    except pa.ArrowInvalid as error:
        values = sessions.to_pylist()
        row = next((row for row, each in enumerate(values) if not _fits_64_bits(each)), 0)
        raise DataError(
            f"{_place(rows, row)}, column {name!r}: {values[row]}; numeric sessions must be "
            "whole and fit into int64"
        ) from error


def _place(rows: Rows, row: int) -> str:
    path, number = rows.origin_of(row)
    return f"{path}: row {number} (from 0)"


def time_numbers(times: Any) -> NDArray[Any]:
    """Times as numbers in their order; timestamps in their unit since 1970."""
    if pt.is_timestamp(times.type):
        times = times.cast(pa.int64())
    numbers: NDArray[Any] = times.to_numpy()
    return numbers


def plain_sessions(sessions: Any) -> Any:
    """Return sessions as integers, strings or bytes of any length, equal where they are.

    Raises:
        ArrowInvalid: a float or decimal is not whole, or does not fit into 64 bits.
    """
    kind = _plain_type(sessions.type)
    if kind != sessions.type:
        sessions = sessions.cast(kind)
    if pt.is_decimal(kind):
        sessions = sessions.cast(pa.decimal256(76, kind.scale))
    if _is_number(kind):
        return sessions.cast(pa.int64())
    return sessions.cast(pa.binary()) if pt.is_fixed_size_binary(kind) else sessions


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pt.is_dictionary(kind) else kind


def _is_number(kind: pa.DataType) -> bool:
    """Whether values are numbers that can be sessions, integers aside."""
    return bool(pt.is_boolean(kind) or pt.is_floating(kind) or pt.is_decimal(kind))


def _fits_64_bits(value: Any) -> bool:
    return value is None or bool(abs(value) < 2**63 and value % 1 == 0)


def is_string(kind: pa.DataType) -> bool:
    """Return whether values are text or bytes, or a dictionary of them."""
    kind = _plain_type(kind)
    return bool(
        pt.is_string(kind)
        or pt.is_large_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_binary(kind)
        or pt.is_fixed_size_binary(kind)
    )
