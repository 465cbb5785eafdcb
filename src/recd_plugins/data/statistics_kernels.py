"""Compiled loops that compare rows with the row before, for ``statistics_accumulator.py``."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from recd_plugins.sparse.memory import int32_at, int64_at
from recd_plugins.sparse.overlap import next_change, offset_at, overlap

u64 = np.uint64
_MIX = u64(0x9E3779B97F4A7C15)


@numba.njit(inline="always")
def _num_common(
    items: Any,
    first: Any,
    first_length: Any,
    second: Any,
    second_length: Any,
    table: Any,
    call: Any,
) -> Any:
    """How many ids of the second list stand in the first; one that stands there twice counts twice.

    Args:
        items: ids.
        first, first_length: where the first list starts, and its ids.
        second, second_length: the same of the second.
        table: int64 ``[3, a power of two > first_length]``, scratch: ids, how many of each are left
            and the call that wrote it.
        call: a number that no other call with this table has, not 0.
    """
    mask = u64(table.shape[1] - 1)
    for index in range(first_length):
        item = items[first + u64(index)]
        slot = (u64(item) * _MIX >> u64(32)) & mask
        while table[2, slot] == call and table[0, slot] != item:
            slot = (slot + u64(1)) & mask
        if table[2, slot] != call:
            table[0, slot], table[1, slot], table[2, slot] = item, 0, call
        table[1, slot] += 1
    shared = 0
    for index in range(second_length):
        item = items[second + u64(index)]
        slot = (u64(item) * _MIX >> u64(32)) & mask
        while table[2, slot] == call and table[0, slot] != item:
            slot = (slot + u64(1)) & mask
        if table[2, slot] == call and table[1, slot] > 0:
            table[1, slot] -= 1
            shared += 1
    return shared


@numba.njit(cache=True, nogil=True)
def compare_rows(columns: Any, continues: Any, max_shift: Any, counts: Any, changed: Any) -> None:
    """Compare each row of each column of int64 ids with the row before it.

    Args:
        columns: int64 ``[num_columns, 3]``: address of the ids, address of the offsets ``[B + 1]``,
            1 if these have 64 bits and 0 if 32.
        continues: bool ``[B]``: whether a row is of the session of the row before it. The first row
            has none before it, whatever stands there.
        max_shift: how far a row may have moved on.
        counts: int64 ``[num_columns, 4]``, is added to, over rows that continue a session: rows
            that equal the row before, their ids, ids shared by a shift, ids shared at any place.
        changed: bool ``[num_columns, B]``, out: whether a row differs from the row before it.
    """
    num_rows = u64(len(continues))
    table, call = np.zeros((3, 64), np.int64), 0
    for column in range(len(columns)):
        items = int64_at(columns[column, 0])
        words, offsets, wide = int32_at(columns[column, 0]), columns[column, 1], columns[column, 2]
        changed[column, :] = False
        rows = 0
        ids = new_ids = strange_ids = np.int64(0)
        for index in range(1, num_rows):
            if continues[index]:
                rows += 1
                row = u64(index)
                ids += np.int64(
                    offset_at(offsets, wide, row + u64(1)) - offset_at(offsets, wide, row)
                )
        equal_rows, equal_ids = rows, ids
        row, stop = u64(1), u64(0)
        while True:
            row, stop = next_change(words, u64(1), offsets, wide, row, stop, num_rows)
            if row >= num_rows:
                break
            changed[column, row] = True
            if continues[row]:
                start = offset_at(offsets, wide, row)
                before = offset_at(offsets, wide, row - u64(1))
                length = offset_at(offsets, wide, row + u64(1)) - start
                old_length = start - before
                equal_rows -= 1
                equal_ids -= np.int64(length)
                moved = overlap(words, u64(1), before, old_length, start, length, max_shift)
                kept = u64(0) if moved < 0 else old_length - u64(moved)
                new_ids += np.int64(length - kept)
                while u64(table.shape[1]) < u64(2) * (old_length + u64(1)):
                    table = np.zeros((3, 2 * table.shape[1]), np.int64)
                call += 1
                # A shift shares what both have of it; of the rest, what stands in both.
                strange_ids += np.int64(length - kept) - _num_common(
                    items, before, old_length - kept, start + kept, length - kept, table, call
                )
            row += u64(1)
        counts[column, 0] += equal_rows
        counts[column, 1] += equal_ids
        counts[column, 2] += ids - new_ids
        counts[column, 3] += ids - strange_ids
