"""The compiled loop that packs rows which share ids with the row before; see ``partial.py``."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from recd_plugins.sparse.memory import copy_bytes, int32_at
from recd_plugins.sparse.overlap import next_change, offset_at, overlap

u64 = np.uint64


@numba.njit(cache=True, nogil=True)
def pack_rows(
    columns: Any,
    max_shift: Any,
    packed: Any,
    room: Any,
    offsets_out: Any,
    lengths_out: Any,
    sizes: Any,
) -> Any:
    """Store of each row only what the row before does not have.

    Args:
        columns: int64 ``[num_columns, 4]``: address of the values, 1 if these have 64 bits and 0 if
            32, address of the offsets, 1 if these have 64 bits and 0 if 32.
        max_shift: values by which a row may have moved on.
        packed: address, out: what is stored, column by column.
        room: values that may be stored there.
        offsets_out: int32 ``[num_columns, B]``, out: where each row begins in its column's part.
        lengths_out: int32 ``[num_columns, B]``, out.
        sizes: int64 ``[num_columns]``, out: values stored of each column.

    Returns:
        Whether there was room; if not, what is in the outputs means nothing.
    """
    left = u64(room)
    num_rows = u64(offsets_out.shape[1])
    for column in range(len(columns)):
        values, value_wide, offsets, wide = columns[column]
        shift = u64(value_wide)
        item = shift + u64(2)
        words = int32_at(values)
        begin, end, length = u64(0), u64(0), u64(0)
        row, stop = u64(0), u64(0)
        while row < num_rows:
            start = offset_at(offsets, wide, row)
            next_length = offset_at(offsets, wide, row + u64(1)) - start
            moved = np.int64(-1)
            if row > u64(0):
                moved = overlap(words, shift, start - length, length, start, next_length, max_shift)
            shared = u64(0) if moved < 0 else length - u64(moved)
            added = next_length - shared
            if end + added > left:
                return False
            copy_bytes(
                packed + np.int64(end << item),
                values + np.int64((start + shared) << item),
                np.int64(added << item),
            )
            begin, end, length = end - shared, end + added, next_length
            first = row
            row, stop = next_change(words, shift, offsets, wide, row + u64(1), stop, num_rows)
            offsets_out[column, first:row] = np.int32(begin)
            lengths_out[column, first:row] = np.int32(length)
        sizes[column] = end
        packed += np.int64(end << item)
        left -= end
    return True
