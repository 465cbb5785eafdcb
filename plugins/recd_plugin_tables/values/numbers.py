"""Values of any type as numbers: float64, NaN where there is none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.columns import ColumnOptions
from recd_plugin_tables.kinds import is_span
from recd_plugin_tables.leaves import is_list, list_parts, plain
from recd_plugin_tables.values.cells import Cells, as_numpy
from recd_plugin_tables.values.times import microseconds, part

#: Every whole number up to here is a float64 that no other one is rounded to.
LARGEST_WHOLE = 2**53 - 1
# Bits of the whole numbers that a float of 16, 32 or 64 bits tells apart.
_FLOAT_BITS = {16: 11, 32: 24, 64: 53}


def largest_whole(kind: pa.DataType) -> int:
    """Return the largest whole number below which a float of this type tells all apart."""
    return int(2 ** _FLOAT_BITS[kind.bit_width] - 1)


def number_type(kind: pa.DataType) -> pa.DataType:
    """Return float32 if it holds every value of a type, or of lists of it; else float64."""
    kind = plain(kind)
    if is_list(kind):
        return number_type(kind.value_type)
    small = (pa.float32(), pa.float16(), pa.int16(), pa.uint16(), pa.int8(), pa.uint8(), pa.bool_())
    return pa.float32() if kind in small else pa.float64()


def numbers_of(cells: Cells, options: ColumnOptions) -> NDArray[np.float64]:
    """A number a value. Times are days since 1970 unless ``by`` says else, durations seconds."""
    values = cells.values
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pt.is_timestamp(kind) or pt.is_date(kind) or options.by is not None:
        times = microseconds(Cells(values, cells.place), options.unit)
        return part(times, options.by or "day")
    if is_span(kind):
        return seconds(values)
    if pt.is_boolean(kind):
        values = values.cast(pa.int8())
    if pt.is_decimal(kind):
        # By their text, as Arrow's own cast rounds twice: 0.70 would be less than 0.7.
        values = values.cast(pa.string())
    # Integers beyond 2^53 are rounded.
    return as_numpy(values.cast(pa.float64(), safe=False), np.nan)


def seconds(values: pa.Array) -> NDArray[np.float64]:
    """Times of day and durations in seconds, NaN where there is none."""
    kind = values.type
    per_second = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
    whole = values.cast(pa.int32()) if pt.is_time32(kind) else values
    return as_numpy(whole.cast(pa.int64()).cast(pa.float64(), safe=False), np.nan) / per_second


def number_rows(cells: Cells, options: ColumnOptions, width: int) -> NDArray[np.float64]:
    """Lists of ``width`` numbers as ``[B, width]``, NaN where there is none.

    Raises:
        DataError: a list is of another length.
    """
    offsets, elements, empty = list_parts(cells.values)
    lost = empty.to_numpy(zero_copy_only=False) | (np.diff(offsets) == 0)
    wrong = ~lost & (np.diff(offsets) != width)
    if wrong.any():
        row = int(wrong.argmax())
        found = int(offsets[row + 1] - offsets[row])
        raise cells.wrong(
            row, f"it has {found} numbers and the first list has {width}; lists of numbers are all "
            "of one length"
        )  # fmt: skip
    rows = np.full((len(cells), width), np.nan)
    rows[~lost] = numbers_of(cells.items(elements, offsets), options).reshape(-1, width)
    return rows
