"""Cells of one column, and where each stands, so that errors can say it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.columns import Unit
from recd_plugin_tables.kinds import is_text
from recd_plugins.api import DataError

_MAX_SHOWN = 60


@dataclass(frozen=True)
class Cells:
    """Values of a column in order.

    Attributes:
        values: as the table has them.
        place: names file, row and column of the value at an index.
    """

    values: pa.Array
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.values)

    def wrong(self, index: int, why: str) -> DataError:
        """The error of a value: where it stands, what it is, and what to do."""
        text = repr(python_value(self.values[index]))
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
        return DataError(f"{self.place(index)}: the value is {shown}; {why}")

    def items(self, values: pa.Array, offsets: NDArray[Any]) -> Cells:
        """The elements of these lists; a place is that of the list."""
        return Cells(values, lambda at: self.place(int(np.searchsorted(offsets, at, "right")) - 1))


def python_value(scalar: pa.Scalar) -> Any:
    """A value as Python has it; as it is stored where Python has none."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, LookupError):
        # A time with nanoseconds, for which pandas is needed, of the year 10000, or of a zone that
        # this machine does not know.
        return getattr(scalar, "value", scalar.type)


def as_numpy(values: pa.Array, fill: Any) -> NDArray[Any]:
    """Values as an array, ``fill`` where they are null."""
    filled = values.fill_null(fill) if values.null_count else values
    return filled.to_numpy(zero_copy_only=False)


def nulls(values: pa.Array) -> NDArray[np.bool_]:
    """Which values are null."""
    return values.is_null().to_numpy(zero_copy_only=False)


_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Whole numbers whose digits are a date, as 20240501.
_FORMATS: dict[Unit, str] = {
    "YYYYMMDD": "%Y%m%d",
    "YYMMDDHH": "%y%m%d%H",
    "YYYYMMDDHH": "%Y%m%d%H",
    "YYYYMMDDHHMM": "%Y%m%d%H%M",
    "YYYYMMDDHHMMSS": "%Y%m%d%H%M%S",
}
# From 1973 to 2286.
_EPOCH: dict[Unit, tuple[float, float]] = {
    "s": (1e8, 1e10), "ms": (1e11, 1e13), "us": (1e14, 1e16), "ns": (1e17, 1e19),
}  # fmt: skip
# Seconds from 2000 to 2040.
_PLAUSIBLE = (946_684_800, 2_208_988_800)
# Microseconds of an hour, of a day, and of the three days between a Monday and 1970-01-01.
_HOUR, _DAY = 3_600 * 10**6, 86_400 * 10**6
_THURSDAY = 3 * _DAY
# Seconds since 1970 reach this in the year 5138, milliseconds did in 1973.
_LATEST_SECOND = 10**11


def microseconds(cells: Cells, unit: Unit | None) -> pa.Int64Array:
    """Times of any type as int64 microseconds since 1970, null where they are.

    Args:
        cells: times, dates, text as 2024-05-01 10:00:00, or numbers of ``unit``.
        unit: of numbers; None: seconds since 1970.
    """
    values = cells.values
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
        cells = Cells(values, cells.place)
    if pt.is_timestamp(values.type) or pt.is_date(values.type):
        return _of_times(cells)
    if is_text(values.type):
        return _parsed(cells)
    if pt.is_decimal(values.type):
        values = values.cast(pa.string()).cast(pa.float64())
    numbers = as_numpy(values.cast(pa.float64()), np.nan) if pt.is_floating(values.type) else None
    empty = nulls(values)
    if numbers is not None:
        empty |= np.isnan(numbers)
    if unit in _FORMATS:
        times = _of_digits(values, unit)
        wrong = nulls(times) & ~empty
        if wrong.any():
            raise cells.wrong(int(wrong.argmax()), f"not a date of the form {unit}")
        return times
    per_second = _PER_SECOND[unit or "s"]
    if numbers is not None:
        seconds = np.where(empty, 0, numbers) / per_second
        _check(cells, seconds, unit)
        return pa.array(np.rint(seconds * 10**6).astype(np.int64), mask=empty)
    whole = as_numpy(values if pt.is_uint64(values.type) else values.cast(pa.int64()), 0)
    _check(cells, whole / per_second, unit)
    if per_second <= 10**6:
        micro = whole.astype(np.int64) * (10**6 // per_second)
    else:
        micro = (whole // (per_second // 10**6)).astype(np.int64)
    return pa.array(micro, mask=empty)


def possible_unit(numbers: NDArray[np.float64]) -> Unit | None:
    """Return the unit in which all numbers are times, None if there is none.

    Digits of dates have to be of 2000 to 2040, numbers since 1970 of 1973 to 2286.

    Args:
        numbers: finite ones, at least one.
    """
    least, largest = numbers.min(), numbers.max()
    for unit in _FORMATS:
        if len(f"{least:.0f}") == len(unit) == len(f"{largest:.0f}"):
            times = _of_digits(pa.array(np.unique(numbers)), unit)
            first, last = pc.min_max(times).as_py().values()
            if not times.null_count and is_plausible(first, last, "us"):
                return unit
    for epoch, (first, last) in _EPOCH.items():
        if first <= least and largest <= last:
            return epoch
    return None


def is_plausible(least: float, largest: float, unit: Unit) -> bool:
    """Return whether Unix times in ``unit`` lie between 2000 and 2040."""
    first, last = (each * _PER_SECOND[unit] for each in _PLAUSIBLE)
    return bool(first <= least and largest < last)


def _of_digits(values: pa.Array, unit: Unit) -> pa.Int64Array:
    """Read numbers such as 20240501 as microseconds since 1970, null where they are no dates."""
    if pt.is_floating(values.type):
        values = pa.array(np.nan_to_num(as_numpy(values.cast(pa.float64()), -1), nan=-1))
    texts = values.cast(pa.int64(), safe=False).cast(pa.string())
    times = pc.strptime(texts, format=_FORMATS[unit], unit="us", error_is_null=True)
    whole = pc.equal(pc.utf8_length(texts), len(unit))  # strptime takes 2024501, too
    return pc.if_else(whole, times, None).cast(pa.int64())


def part(times: pa.Int64Array, by: Literal["hour", "weekday", "day"]) -> NDArray[np.float64]:
    """Hour of the day, day of the week from Monday on, or days since 1970, with the fraction."""
    micro: NDArray[Any] = as_numpy(times, 0)
    if by == "hour":
        found = (micro % _DAY) / _HOUR
    elif by == "weekday":
        found = ((micro + _THURSDAY) % (7 * _DAY)) / _DAY
    else:
        found = micro / _DAY
    return np.where(nulls(times), np.nan, found)


def _of_times(cells: Cells) -> pa.Int64Array:
    """Return timestamps and dates in microseconds; nanoseconds are cut off."""
    values = cells.values
    if pt.is_timestamp(values.type):
        values = values.cast(pa.timestamp(values.type.unit))  # with a zone, it is UTC
    fits = values.type == pa.timestamp("ns")
    try:
        return values.cast(pa.timestamp("us"), safe=not fits).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise cells.wrong(0, f"some time is beyond 64 bits of microseconds: {error}") from error


def _parsed(cells: Cells) -> pa.Int64Array:
    # All with a zone, as 2024-05-01T10:00:00Z, or all without.
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        with suppress(pa.ArrowInvalid):
            return cells.values.cast(kind).cast(pa.int64())
    zoned = any("+" in str(v)[10:] or str(v).endswith("Z") for v in cells.values.slice(0, 1))
    kind = pa.timestamp("us", "UTC") if zoned else pa.timestamp("us")
    for index, value in enumerate(cells.values):
        try:
            value.cast(kind)
        except pa.ArrowInvalid as error:
            raise cells.wrong(
                index,
                "write times as 2024-05-01 10:00:00, all with an offset or all without, or as "
                "numbers",
            ) from error
    raise cells.wrong(0, "some times have a zone and some have none; write all the same way")


def _check(cells: Cells, seconds: NDArray[np.float64], unit: Unit | None) -> None:
    wrong = np.abs(seconds) > _LATEST_SECOND
    if wrong.any():
        raise cells.wrong(
            int(wrong.argmax()),
            f"this is no time since 1970 in {unit or 's'}; set its unit: ms, us or ns",
        )
