"""Numba functions that find and copy the distinct rows of jagged columns, for ``dedup.py``.

Buffers are passed as memory addresses, so that one call can process any number of columns.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from recd_plugins.sparse.overlap import (
    CHUNK,
    bytes_differ,
    copy_bytes,
    find_changes,
    int32_at,
    int64_at,
    offset_at,
    prefetch,
)

u64 = np.uint64
_MIX = u64(0x94D049BB133111EB)
_LOW = u64(0xFFFFFFFF)
_STEP = u64(0x9E3779B97F4A7C15)
#: Prefetch distance in rows.
_AHEAD = 8


@numba.njit(inline="always")
def _hash_row(values: Any, shift: Any, start: Any, length: Any) -> Any:
    """Return a hash > 0 of a row's values, computed as in NH (UMAC, section 4)."""
    total = length
    if shift:
        items = int64_at(values)
        for index in range(length):
            shifted = u64(items[start + u64(index)]) + (u64(index) + u64(1)) * _STEP
            total += (shifted & _LOW) * (shifted >> u64(32))
    else:
        narrow_items = int32_at(values)
        for index in range(length):
            shifted = u64(narrow_items[start + u64(index)]) + (u64(index) + u64(1)) * _STEP
            total += (shifted & _LOW) * (shifted >> u64(32))
    total = (total ^ (total >> u64(30))) * _MIX
    return total ^ (total >> u64(31)) | u64(1)


@numba.njit(inline="always")
def _look_at_column(
    column: Any, hashing: Any, hashes: Any, changed: Any, rows: Any, target: Any, end: Any
) -> Any:
    """Mark, copy and (if ``hashing``) hash the rows of a column that differ from the previous row.

    Copies are written from address ``target`` up to ``end``. Returns the end of the copies; it is
    beyond ``end`` if there was too little room.
    """
    values, shift, offsets, wide = column
    item = shift + 2
    num_rows = len(changed)
    for first in range(0, num_rows, CHUNK):
        count = find_changes(
            values, item, offsets, wide, first, min(first + CHUNK, num_rows), changed, rows
        )
        for index in range(count):
            row = u64(rows[index])
            start = offset_at(offsets, wide, row)
            length = offset_at(offsets, wide, row + u64(1)) - start
            if hashing:
                hashes[row] = _hash_row(values, shift, start, length)
            size = np.int64(length) << item
            if target + size <= end:
                copy_bytes(target, values + (np.int64(start) << item), size)
            target += size
    return target


@numba.njit(inline="always")
def _number_changes(changed: Any, rows: Any, inverse: Any) -> Any:
    """Write the rows that differ from the previous row to ``rows``, and number all rows."""
    count = 0
    for row in range(len(inverse)):
        rows[count] = row
        count += changed[row]
        inverse[row] = count - 1
    return count


@numba.njit(inline="always")
def _equal_in_all(columns: Any, row: Any, earlier: Any) -> Any:
    """Return whether rows ``row`` and ``earlier`` are equal in all columns."""
    for column in range(len(columns)):
        values, shift, offsets, wide = columns[column]
        item = shift + 2
        start, other = offset_at(offsets, wide, row), offset_at(offsets, wide, earlier)
        length = offset_at(offsets, wide, row + u64(1)) - start
        if offset_at(offsets, wide, earlier + u64(1)) - other != length:
            return False
        left, back = values + (np.int64(start) << item), np.int64(start - other) << item
        if bytes_differ(left, back, np.int64(length) << item):
            return False
    return True


@numba.njit(inline="always")
def _number_distinct(
    columns: Any,
    changed: Any,
    column_hashes: Any,
    hash_mask: Any,
    hashes: Any,
    table: Any,
    rows: Any,
    first_rows: Any,
) -> Any:
    """Number the distinct rows among ``rows``, which differ from the previous row; count them."""
    mask = u64(len(table) - 1)
    table[:] = -1
    current = np.empty(len(columns), np.uint64)
    count = 0
    for change in range(len(rows)):
        row = u64(rows[change])
        key = u64(0)
        for column in range(len(columns)):
            if changed[column, row]:
                current[column] = column_hashes[column, row]
            key = (key ^ current[column]) * _MIX
            key ^= key >> u64(31)
        key &= hash_mask
        slot = key & mask
        while True:
            number = table[slot]
            if number < 0:
                number = count
                table[slot] = count
                hashes[count] = key
                first_rows[count] = row
                count += 1
                break
            if hashes[number] == key and _equal_in_all(columns, row, u64(first_rows[number])):
                break
            slot = (slot + u64(1)) & mask
        rows[change] = number
    return count


@numba.njit(cache=True, nogil=True)
def find_unique_rows(
    columns: Any,
    group_ends: Any,
    neighbours_only: Any,
    hash_mask: Any,
    column_hashes: Any,
    hashes: Any,
    table: Any,
    first_rows: Any,
    inverse: Any,
    num_unique: Any,
    sizes: Any,
    copies: Any,
    room: Any,
    copied: Any,
) -> None:
    """Find the distinct rows of each group of columns, in the order of first occurrence.

    If data is sorted by session, the rows that differ from the previous row are usually the
    distinct rows. These rows are copied while they are found.

    Args:
        columns: int64 ``[num_columns, 4]``. Address of the values, 1 for 64-bit values and 0 for
            32-bit, address of the offsets, 1 for 64-bit offsets and 0 for 32-bit.
        group_ends: int64 ``[num_groups]``, exclusive index of each group's last column.
        neighbours_only: whether to compare a row only with the previous row.
        hash_mask: mask of the hash bits to use.
        column_hashes: scratch memory, uint64 ``[columns of the largest group, B]``.
        hashes: scratch memory, uint64 ``[B]``.
        table: scratch memory for a hash table, int32, with a power of two > B as size.
        first_rows: output, int32 ``[num_groups, B]``, first occurrence of each distinct row.
        inverse: output, int64 ``[num_groups, B]``, distinct row of each row.
        num_unique: output, int64 ``[num_groups]``, number of distinct rows.
        sizes: output, int64 ``[num_columns]``, number of values in the distinct rows.
        copies: output address for the distinct rows of each column of the groups in ``copied``.
        room: number of bytes at ``copies``.
        copied: output, bool ``[num_groups]``, whether a group's rows are at ``copies``.
    """
    end_of_copies = copies + room
    num_rows = column_hashes.shape[1]
    changed = np.empty((len(column_hashes), num_rows), np.uint8)
    any_changed = np.empty(num_rows, np.uint8)
    rows = np.empty(max(num_rows, CHUNK) + 1, np.int32)
    begin = 0
    for group in range(len(group_ends)):
        end = group_ends[group]
        target, together = copies, True
        any_changed[:] = 0
        for column in range(begin, end):
            marks = changed[column - begin]
            target = _look_at_column(
                columns[column],
                not neighbours_only,
                column_hashes[column - begin],
                marks,
                rows,
                target,
                end_of_copies,
            )
            apart = np.uint8(0)
            for index in range(num_rows):
                apart |= marks[index] ^ changed[0, index]
                any_changed[index] |= marks[index]
            together = together and apart == 0
        num_changes = _number_changes(any_changed, rows, inverse[group])
        if neighbours_only:
            for index in range(num_changes):  # slice assignments compile slowly
                first_rows[group, index] = rows[index]
            count = num_changes
        else:
            count = _number_distinct(
                columns[begin:end],
                changed,
                column_hashes,
                hash_mask,
                hashes,
                table,
                rows[:num_changes],
                first_rows[group],
            )
        num_unique[group] = count
        if count < num_changes:
            for index in range(num_rows):
                inverse[group, index] = rows[inverse[group, index]]
        # All columns change in these rows, and no two of the rows are equal.
        copied[group] = together and count == num_changes and target <= end_of_copies
        if copied[group]:
            copies = target
        for column in range(begin, end):
            offsets, wide = columns[column, 2], columns[column, 3]
            values_of_column = u64(0)
            for index in range(count):
                taken = u64(first_rows[group, index])
                start = offset_at(offsets, wide, taken)
                values_of_column += offset_at(offsets, wide, taken + u64(1)) - start
            sizes[column] = values_of_column
        begin = end


@numba.njit(cache=True, nogil=True)
def copy_rows(
    columns: Any, group_ends: Any, first_rows: Any, num_unique: Any, copied: Any, targets: Any
) -> None:
    """Copy the distinct rows of each column, or only lengths if the rows are already copied.

    ``targets``, int64 ``[num_columns, 2]``, has the output addresses for values and int32 lengths.
    The other arguments are arguments and outputs of ``find_unique_rows``.
    """
    begin = 0
    for group in range(len(group_ends)):
        count = num_unique[group]
        for column in range(begin, group_ends[group]):
            values, shift, offsets, wide = columns[column]
            target, lengths = targets[column, 0], int32_at(targets[column, 1])
            for index in range(count if copied[group] else 0):
                row = u64(first_rows[group, index])
                end = offset_at(offsets, wide, row + u64(1))
                lengths[index] = np.int32(end - offset_at(offsets, wide, row))
            for index in range(0 if copied[group] else count):
                row = u64(first_rows[group, index])
                ahead = u64(first_rows[group, min(index + _AHEAD, count - 1)])
                coming = values + (np.int64(offset_at(offsets, wide, ahead)) << (shift + 2))
                for line in range(8):
                    prefetch(coming + 64 * line)
                start = offset_at(offsets, wide, row)
                length = offset_at(offsets, wide, row + u64(1)) - start
                lengths[index] = np.int32(length)
                size = np.int64(length) << (shift + 2)
                copy_bytes(target, values + (np.int64(start) << (shift + 2)), size)
                target += size
        begin = group_ends[group]


@numba.njit(cache=True)
def address_of(array: Any) -> Any:
    """Return the memory address of a numpy array. Faster than ``array.ctypes.data``."""
    return array.ctypes.data
