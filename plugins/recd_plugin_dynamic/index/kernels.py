"""Hash table with linear probing, compiled by numba.

The array ``slots``, int64 ``[2 * num_slots]``, contains pairs of id and row. A free slot is the
pair (-1, -1). The number of slots is a power of 2. Ids are processed in blocks. The first loop over
a block reads the first slot of every id, so that many cache misses are served at once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from recd_plugin_dynamic.index.mix import mix_one

u64 = np.uint64
_BLOCK = 256


@numba.njit(cache=True, nogil=True)
def find(ids: Any, slots: Any, rows: Any, unknown: Any) -> Any:
    """Write the row of each id to ``rows``, or -1, and the indices of unknown ids to ``unknown``.

    Returns:
        The number of unknown ids, and the bitwise or of all ids, which is negative if any id is.
    """
    mask = u64((len(slots) >> 1) - 1)
    homes = np.empty(_BLOCK, np.uint64)
    keys = np.empty(_BLOCK, np.int64)
    num_unknown, signs = 0, 0
    for start in range(0, len(ids), _BLOCK):
        size = min(_BLOCK, len(ids) - start)
        for index in range(size):
            key = ids[start + index]
            signs |= key
            homes[index] = (mix_one(key) & mask) << u64(1)
            keys[index] = slots[homes[index]]
        for index in range(size):
            at, key = homes[index], keys[index]
            while key != ids[start + index] and key != -1:
                at = (at + u64(2)) & (mask << u64(1))
                key = slots[at]
            row = slots[at + u64(1)]
            rows[start + index] = row
            unknown[num_unknown] = start + index
            num_unknown += row < 0
    return num_unknown, signs


@numba.njit(cache=True, nogil=True)
def insert(ids: Any, rows: Any, slots: Any) -> Any:
    """Add unknown ids with their rows. Skips negative ids. The result has no meaning."""
    mask = u64((len(slots) >> 1) - 1)
    homes = np.empty(_BLOCK, np.uint64)
    touched = 0
    for start in range(0, len(ids), _BLOCK):
        size = min(_BLOCK, len(ids) - start)
        for index in range(size):
            homes[index] = (mix_one(ids[start + index]) & mask) << u64(1)
            touched |= slots[homes[index]]
        for index in range(size):
            if ids[start + index] < 0:
                continue
            at = homes[index]
            while slots[at] != -1:
                at = (at + u64(2)) & (mask << u64(1))
            slots[at] = ids[start + index]
            slots[at + u64(1)] = rows[start + index]
    return touched


@numba.njit(cache=True, nogil=True)
def remove(ids: Any, slots: Any) -> None:
    """Remove known ids, and move later slots back, so that lookups need no tombstones."""
    mask = u64((len(slots) >> 1) - 1)
    for key in ids:
        hole = mix_one(key) & mask
        while slots[hole << u64(1)] != key:
            hole = (hole + u64(1)) & mask
        slot = hole
        while True:
            slot = (slot + u64(1)) & mask
            other = slots[slot << u64(1)]
            if other == -1:
                break
            home = mix_one(other) & mask
            if (slot - home) & mask >= (slot - hole) & mask:
                slots[hole << u64(1)] = other
                slots[(hole << u64(1)) + u64(1)] = slots[(slot << u64(1)) + u64(1)]
                hole = slot
        slots[hole << u64(1)] = -1
        slots[(hole << u64(1)) + u64(1)] = -1


@numba.njit(cache=True, nogil=True)
def take_rows(ids: Any, buckets: Any, id_of_row: Any, cursors: Any, rows: Any) -> None:
    """Give each id the first free row of its bucket. ``id_of_row`` is ``[buckets, rows]``.

    A bucket has no free row before ``cursors[bucket]``.
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
