"""Compiled loops that find and copy unique rows; ``dedup.py`` is how to call them.

Buffers come as addresses, so that one call serves the columns of a whole batch, whatever their
number, without a copy. Indices are unsigned throughout, as in ``overlap.py``.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from recd_plugins.sparse.memory import copy_bytes, int32_at, int64_at, prefetch
from recd_plugins.sparse.overlap import first_difference, next_change, offset_at

u64 = np.uint64
_MIX = u64(0x94D049BB133111EB)
_LOW = u64(0xFFFFFFFF)
_STEP = u64(0x9E3779B97F4A7C15)
#: Rows between the one that is copied and the one that is fetched from memory meanwhile.
_AHEAD = 8


@numba.njit(inline="always")
def _hash_row(values: Any, shift: Any, start: Any, length: Any) -> Any:
    """A hash that is never 0: products of the halves of shifted values, as in NH (UMAC, section 4).

    A product of two 32-bit numbers is one SIMD instruction, which a 64-bit product is not.
    """
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
def _hash_changes(
    values: Any, shift: Any, offsets: Any, wide: Any, hashes: Any, target: Any, end: Any
) -> Any:
    """Hash each row that is not the row before it; the others are left 0.

    While such a row is in the cache it is copied, too, from address ``target`` on up to ``end``.
    Returns how many rows that were, and where the copies end, which is behind ``end`` where not all
    found room.
    """
    words = int32_at(values)
    num_rows = u64(len(hashes))
    changes = 0
    row, stop = u64(0), u64(0)
    while row < num_rows:
        start = offset_at(offsets, wide, row)
        length = offset_at(offsets, wide, row + u64(1)) - start
        hashes[row] = _hash_row(values, shift, start, length)
        size = np.int64(length << u64(shift + 2))
        if target + size <= end:
            copy_bytes(target, values + np.int64(start << u64(shift + 2)), size)
        target += size
        changes += 1
        row, stop = next_change(words, shift, offsets, wide, row + u64(1), stop, num_rows)
    return changes, target


@numba.njit(inline="always")
def _rows_equal(words: Any, shift: Any, offsets: Any, wide: Any, left: Any, right: Any) -> Any:
    start, other = offset_at(offsets, wide, left), offset_at(offsets, wide, right)
    end = offset_at(offsets, wide, left + u64(1))
    if offset_at(offsets, wide, right + u64(1)) - other != end - start:
        return False
    # ``left`` is the later row, so it stands behind ``right``.
    back = (start - other) << shift
    return first_difference(words, start << shift, back, end << shift) == end << shift


@numba.njit(cache=True, nogil=True)
def find_unique_rows(
    columns: Any,
    group_ends: Any,
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
    """Number the distinct rows of each group of columns in the order in which they occur.

    In clustered data the columns of a group mostly change in the same rows, and never back to what
    they were: then the rows that change are the distinct ones, and are copied already.

    Args:
        columns: int64 ``[num_columns, 4]``: address of the values, 1 if these have 64 bits and 0 if
            32, address of the offsets, 1 if these have 64 bits and 0 if 32.
        group_ends: int64 ``[num_groups]``: where each group's columns end.
        hash_mask: bits of the hash to use.
        column_hashes: uint64 ``[columns of the largest group, B]``, scratch.
        hashes: uint64 ``[B]``, scratch.
        table: int32, a power of two > B, scratch.
        first_rows: int32 ``[num_groups, B]``, out: row of the first occurrence.
        inverse: int64 ``[num_groups, B]``, out.
        num_unique: int64 ``[num_groups]``, out.
        sizes: int64 ``[num_columns]``, out: values in the unique rows of each column.
        copies: address, out: the unique rows of each column of each group in ``copied``, one after
            the other.
        room: bytes there.
        copied: bool ``[num_groups]``, out: the groups whose unique rows are there.
    """
    end_of_copies = copies + room
    num_rows = column_hashes.shape[1]
    mask = u64(len(table) - 1)
    current = np.empty(len(column_hashes), np.uint64)
    begin = 0
    for group in range(len(group_ends)):
        end = group_ends[group]
        table[:] = -1
        target, fewest_changes = copies, num_rows
        for column in range(begin, end):
            values, shift, offsets, wide = columns[column]
            column_hashes[column - begin] = 0
            changes, target = _hash_changes(
                values, shift, offsets, wide, column_hashes[column - begin], target, end_of_copies
            )
            fewest_changes = min(fewest_changes, changes)
        count, last, rows_that_change = 0, 0, 0
        for index in range(num_rows):
            row = u64(index)
            changed = False
            for column in range(end - begin):
                if column_hashes[column, row] != 0:
                    current[column] = column_hashes[column, row]
                    changed = True
            if not changed:
                inverse[group, row] = last
                continue
            rows_that_change += 1
            key = u64(0)
            for column in range(end - begin):
                key = (key ^ current[column]) * _MIX
                key ^= key >> u64(31)
            key &= hash_mask
            slot = key & mask
            while True:
                candidate = table[slot]
                if candidate < 0:
                    table[slot] = count
                    hashes[count] = key
                    first_rows[group, count] = index
                    last = count
                    count += 1
                    break
                if hashes[candidate] == key:
                    equal = True
                    first = u64(first_rows[group, candidate])
                    for column in range(begin, end):
                        values, shift, offsets, wide = columns[column]
                        words = int32_at(values)
                        if not _rows_equal(words, u64(shift), offsets, wide, row, first):
                            equal = False
                            break
                    if equal:
                        last = candidate
                        break
                slot = (slot + u64(1)) & mask
            inverse[group, row] = last
        num_unique[group] = count
        # Every column changes in each of these rows, and no two of them are equal.
        copied[group] = count == rows_that_change == fewest_changes and target <= end_of_copies
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
    """Copy the unique rows of each column, or only their lengths where the rows are copied already.

    Args:
        columns: as ``find_unique_rows`` takes them.
        group_ends: the same.
        first_rows: what it found.
        num_unique: what it found.
        copied: what it copied.
        targets: int64 ``[num_columns, 2]``: addresses for a column's values, of the width of the
            column's, and for its lengths, int32.
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
