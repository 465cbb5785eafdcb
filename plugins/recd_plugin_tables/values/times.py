"""Times as microseconds since 1970, UTC, and what of them is a feature."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.kinds import is_text
from recd_plugin_tables.values.cells import Cells, as_numpy, nulls

Unit = Literal["s", "ms", "us", "ns"]
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Microseconds of an hour, of a day, and of the three days between a Monday and 1970-01-01.
_HOUR, _DAY = 3_600 * 10**6, 86_400 * 10**6
_THURSDAY = 3 * _DAY
# Seconds since 1970 reach this in the year 5138, milliseconds did in 1973.
_LATEST_SECOND = 10**11


def microseconds(cells: Cells, unit: Unit | None) -> pa.Int64Array:
    """Times of any type as int64 microseconds since 1970, null where they are.

    Args:
        cells: times, dates, text as 2024-05-01 10:00:00, or numbers of ``unit``.
        unit: of numbers; None: seconds.

    Raises:
        DataError: text is no time, or numbers are none in this unit.
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
    per_second = _PER_SECOND[unit or "s"]
    empty = nulls(values)
    if numbers is not None:
        empty |= np.isnan(numbers)
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
    """What times and dates are; what nanoseconds have besides is cut off."""
    values = cells.values
    if pt.is_timestamp(values.type):
        values = values.cast(pa.timestamp(values.type.unit))  # with a zone, it is UTC
    try:
        fits = values.type == pa.timestamp("ns")
        return values.cast(pa.timestamp("us"), safe=not fits).cast(pa.int64())
    except pa.ArrowInvalid:
        for index, value in enumerate(values):
            try:
                value.cast(pa.timestamp("us"))
            except pa.ArrowInvalid as error:
                raise cells.wrong(
                    index, "64 bits of microseconds since 1970 do not reach there; write a null"
                ) from error
        raise


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
