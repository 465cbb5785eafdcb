"""Partial deduplication of jagged numpy columns (RecD, section 7).

In data clustered by session, the next row of a history drops old ids and appends new ids. Ids in
common with the previous row are stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from recd_plugins.sparse.dedup import SPARE, JaggedColumn, describe
from recd_plugins.sparse.kernels import address_of
from recd_plugins.sparse.overlap import (
    copy_bytes,
    int32_at,
    next_change,
    offset_at,
    overlap,
)

MAX_SHIFT = 8
u64 = np.uint64


@dataclass(frozen=True)
class PackedRows:
    """Partially deduplicated columns of B rows, in which rows share stored values.

    Attributes:
        values: stored values, column by column.
        offsets: start of each row from its column's first value, int32 ``[num_columns, B]``.
        lengths: lengths of the rows, int32 ``[num_columns, B]``.
        sizes: number of stored values of each column.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32]
    sizes: tuple[int, ...]


class RowPacker:
    """Stores values that consecutive rows have in common once. Thread-safe.

    Args:
        max_shift: maximum number of values that a row may drop from the previous row.
    """

    def __init__(self, max_shift: int = MAX_SHIFT) -> None:
        self._max_shift = max_shift
        self._share = 1.0

    def __call__(self, columns: Sequence[JaggedColumn], num_rows: int) -> PackedRows:
        """Partially deduplicate columns of ``num_rows`` rows. All columns must have one dtype."""
        total = sum(int(offsets[-1]) - int(offsets[0]) for _, offsets in columns)
        described = np.array([describe(column, num_rows) for column in columns], np.int64)
        sizes = np.empty(len(columns), np.int64)
        shape = (len(columns), num_rows)
        offsets, lengths = np.empty(shape, np.int32), np.empty(shape, np.int32)

        def packed(room: int) -> NDArray[Any] | None:
            values = np.empty(room, columns[0][0].dtype)
            fits = pack_rows(
                described, self._max_shift, address_of(values), room, offsets, lengths, sizes
            )
            return values[: int(sizes.sum())] if fits else None

        values = packed(int(total * self._share))
        if values is None:
            values = packed(total)
            assert values is not None
        if values.size * 2 < total * self._share:
            values = values.copy()  # frees unused memory
        if total:
            self._share = min(1.0, SPARE * values.size / total)
        return PackedRows(values, offsets, lengths, tuple(sizes.tolist()))


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
    """For each row, append the values that are not in the previous row to ``packed``.

    Returns:
        False if the ``room`` at ``packed`` is too small. The outputs are then undefined.
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
