"""Hash table with linear probing over cache lines, compiled by numba.

The array ``slots``, int64 ``[8 * num_lines]``, is aligned to cache lines. A line contains 4 ids,
then the rows of these ids. Free places follow the ids of a line and contain -1. An id is in the
first line with room, starting at its home line. The number of lines is a power of 2. Most ids are
in their home lines, so that the processor predicts the branches of a search.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from recd_plugin_dynamic.index.mix import mix_one
from recd_plugins.api import memory_intrinsics

prefetch = memory_intrinsics.prefetch
u64 = np.uint64
#: Prefetch distance in ids.
_AHEAD = 32
_MAX_LOAD = 0.75


def empty_slots(capacity: int) -> NDArray[np.int64]:
    """Return the slots of a hash table for at most ``capacity`` ids."""
    num_lines = 1 << max(int(capacity / (4 * _MAX_LOAD)), 1).bit_length()
    memory: NDArray[np.int64] = np.full(8 * num_lines + 8, -1, np.int64)
    return memory[-memory.ctypes.data % 64 // 8 :][: 8 * num_lines]


@numba.njit(inline="always")
def _home(key: Any, slots: Any) -> Any:
    """Return the index in ``slots`` of the line at which the search for an id starts."""
    return (mix_one(key) << u64(3)) & u64(len(slots) - 1)


@numba.njit(inline="always")
def _next(line: Any, slots: Any) -> Any:
    return (line + u64(8)) & u64(len(slots) - 1)


@numba.njit(inline="always")
def _place(key: Any, line: Any, slots: Any) -> Any:
    """Return the place of an id in a line, from 0 to 3, or 4 if the line does not contain it."""
    return (
        u64(4)
        - u64(slots[line] == key) * u64(4)
        - u64(slots[line + u64(1)] == key) * u64(3)
        - u64(slots[line + u64(2)] == key) * u64(2)
        - u64(slots[line + u64(3)] == key)
    )


@numba.njit(inline="always")
def _is_full(line: Any, slots: Any) -> Any:
    return slots[line + u64(3)] != -1


@numba.njit(inline="always")
def _num_ids(line: Any, slots: Any) -> Any:
    return (
        u64(slots[line] != -1)
        + u64(slots[line + u64(1)] != -1)
        + u64(slots[line + u64(2)] != -1)
        + u64(slots[line + u64(3)] != -1)
    )


@numba.njit(inline="always")
def _prefetch(ids: Any, index: Any, slots: Any) -> None:
    """Prefetch the home line of an id, and the next line, which some searches need."""
    if index < len(ids):
        home = _home(ids[index], slots)
        prefetch(slots.ctypes.data + np.int64(home << u64(3)))
        prefetch(slots.ctypes.data + np.int64(_next(home, slots) << u64(3)))


@numba.njit(cache=True, nogil=True)
def find(ids: Any, slots: Any, rows: Any, unknown: Any) -> Any:
    """Write the row of each id to ``rows``, or -1, and the indices of unknown ids to ``unknown``.

    Returns the number of unknown ids. No id may be negative.
    """
    for index in range(_AHEAD):
        _prefetch(ids, index, slots)
    num_unknown = 0
    for index in range(len(ids)):
        _prefetch(ids, index + _AHEAD, slots)
        line = _home(ids[index], slots)
        place = _place(ids[index], line, slots)
        while place == u64(4) and _is_full(line, slots):
            line = _next(line, slots)
            place = _place(ids[index], line, slots)
        row = slots[line + u64(4) + (place & u64(3))]
        rows[index] = -1 if place == u64(4) else row
        unknown[num_unknown] = index
        num_unknown += place == u64(4)
    return num_unknown


@numba.njit(inline="always")
def _append(key: Any, row: Any, line: Any, slots: Any) -> None:
    """Add an id to a line with room."""
    at = line + _num_ids(line, slots)
    slots[at], slots[at + u64(4)] = key, row


@numba.njit(cache=True, nogil=True)
def insert(ids: Any, rows: Any, slots: Any) -> None:
    """Add unknown ids with their rows. Skips negative ids."""
    for index in range(_AHEAD):
        _prefetch(ids, index, slots)
    for index in range(len(ids)):
        _prefetch(ids, index + _AHEAD, slots)
        if ids[index] < 0:
            continue
        line = _home(ids[index], slots)
        while _is_full(line, slots):
            line = _next(line, slots)
        _append(ids[index], rows[index], line, slots)


@numba.njit(inline="always")
def _take_out(line: Any, place: Any, slots: Any) -> None:
    """Free a place of a line, and move the last id of the line to it."""
    at, last = line + place, line + _num_ids(line, slots) - u64(1)
    slots[at], slots[at + u64(4)] = slots[last], slots[last + u64(4)]
    slots[last] = slots[last + u64(4)] = -1


@numba.njit(inline="always")
def _displaced(line: Any, hole: Any, slots: Any) -> Any:
    """Return the place in ``line`` of an id that can move to the earlier line ``hole``, or 4."""
    last = u64(len(slots) - 1)
    for place in range(u64(0), _num_ids(line, slots)):
        home = _home(slots[line + place], slots)
        if (line - home) & last >= (line - hole) & last:
            return place
    return u64(4)


@numba.njit(cache=True, nogil=True)
def remove(ids: Any, slots: Any) -> None:
    """Remove known ids, and move later ids back, so that searches need no tombstones."""
    for index in range(_AHEAD):
        _prefetch(ids, index, slots)
    for index in range(len(ids)):
        _prefetch(ids, index + _AHEAD, slots)
        hole = _home(ids[index], slots)
        place = _place(ids[index], hole, slots)
        while place == u64(4):
            hole = _next(hole, slots)
            place = _place(ids[index], hole, slots)
        goes_on = _is_full(hole, slots)
        _take_out(hole, place, slots)
        line = hole
        while goes_on:
            line = _next(line, slots)
            goes_on = _is_full(line, slots)
            place = _displaced(line, hole, slots)
            if place < u64(4):
                _append(slots[line + place], slots[line + place + u64(4)], hole, slots)
                _take_out(line, place, slots)
                hole = line


@numba.njit(cache=True, nogil=True)
def take_rows(ids: Any, buckets: Any, id_of_row: Any, cursors: Any, rows: Any) -> None:
    """Write the first free row of each id's bucket to ``rows``, and the id to ``id_of_row``.

    ``id_of_row``, ``[num_buckets, rows_per_bucket]``, is -1 for free rows. ``rows``, ``[n]``, are
    indices of the flattened ``id_of_row``. No row before ``cursors[bucket]`` is free.
    """
    rows_per_bucket = id_of_row.shape[1]
    for index in range(len(ids)):
        bucket = buckets[index]
        row = cursors[bucket]
        while id_of_row[bucket, row] >= 0:
            row += 1
        id_of_row[bucket, row] = ids[index]
        rows[index] = bucket * rows_per_bucket + row
        cursors[bucket] = row + 1
