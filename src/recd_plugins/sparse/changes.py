"""Which rows differ from the row before; for use inside numba functions only.

No branch depends on what rows hold, only on how long they are: no processor foresees which rows
change, and each wrong guess costs what a row of a hundred bytes does.

Numba's cache does not see a change here, only one in the file of the compiled function: after one,
delete ``__pycache__/*.nb?`` next to the kernels.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from recd_plugins.sparse.memory import int32_at, line_differs, prefetch
from recd_plugins.sparse.overlap import offset_at

u64 = np.uint64
_LINE = 64
#: Bytes between what is compared and what is fetched from memory meanwhile.
_AHEAD = 8192
#: Rows after which those that changed are worked on, while they are in the cache.
CHUNK = 32


@numba.njit(inline="always")
def bytes_differ(left: Any, back: Any, size: Any) -> Any:
    """Whether ``size`` bytes, a multiple of 4, from ``left`` on are not those ``back`` before."""
    difference = u64(0)
    if size >= _LINE:
        last = left + size - _LINE
        while left < last:
            prefetch(left + _AHEAD)
            difference |= line_differs(left, left - back)
            left += _LINE
        # A line that ends where the comparison does.
        prefetch(last + _AHEAD)
        difference |= line_differs(last, last - back)
    else:
        words, others = int32_at(left), int32_at(left - back)
        for index in range(size >> 2):
            difference |= u64(words[index] ^ others[index])
    return difference != u64(0)


@numba.njit(inline="always")
def find_changes(
    values: Any, item: Any, offsets: Any, wide: Any, first: Any, end: Any, changed: Any, rows: Any
) -> Any:
    """Mark the rows from ``first`` up to ``end`` that differ from the row before; row 0 does.

    Args:
        values: address of the column's values.
        item: logarithm of the bytes of a value.
        offsets: address of the offsets.
        wide: whether they have 64 bits, or 32.
        first: int64.
        end: int64.
        changed: uint8 ``[B]``, out: 1 for rows that differ, 0 for the others.
        rows: integers, one more than there are rows here, out: those that differ.

    Returns:
        How many differ.
    """
    count = 0
    start = np.int64(offset_at(offsets, wide, first)) << item
    back = np.int64(-1)
    if first > 0:
        back = start - (np.int64(offset_at(offsets, wide, first - 1)) << item)
    for row in range(first, end):
        stop = np.int64(offset_at(offsets, wide, row + 1)) << item
        size = stop - start
        differs = True
        if size == back:
            differs = bytes_differ(values + start, back, size)
        changed[row] = differs
        rows[count] = row
        count += differs
        start, back = stop, size
    return count
