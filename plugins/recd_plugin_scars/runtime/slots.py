"""Assignment of table rows to slots (row indices of the cache memory), compiled by numba."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

#: Stands for the absence of a slot or a row.
NONE = -1


@numba.njit(cache=True, nogil=True)
def admit(
    ids: Any,
    first: Any,
    end: Any,
    first_row: Any,
    batch: Any,
    slot_of_row: Any,
    row_of_slot: Any,
    batch_of_slot: Any,
    free: Any,
    num_free: Any,
    slot_of_id: Any,
    slots: Any,
    num_slots: Any,
    missing: Any,
    num_missing: Any,
) -> tuple[Any, Any, Any, Any]:
    """Assign a cache slot to each id in ``ids[first:end]`` of one table.

    Writes the slots to ``slot_of_id``, appends distinct slots to ``slots``, and appends the slots
    of rows that are not cached to ``missing``. ``batch_of_slot`` is the last batch that used each
    slot.

    Returns:
        The index of the first id without a slot (``end`` if there were enough free slots), and the
        new ``num_free``, ``num_slots`` and ``num_missing``.
    """
    for index in range(first, end):
        row = first_row + ids[index]
        slot = slot_of_row[row]
        if slot < 0:
            if num_free == 0:
                return index, num_free, num_slots, num_missing
            num_free -= 1
            slot = free[num_free]
            slot_of_row[row] = slot
            row_of_slot[slot] = row
            missing[num_missing] = slot
            num_missing += 1
        if batch_of_slot[slot] != batch:
            batch_of_slot[slot] = batch
            slots[num_slots] = slot
            num_slots += 1
        slot_of_id[index] = slot
    return end, num_free, num_slots, num_missing


@numba.njit(cache=True, nogil=True)
def pin(slots: Any, pins: Any) -> None:
    for slot in slots:
        pins[slot] += 1


@numba.njit(cache=True, nogil=True)
def unpin(slots: Any, bounds: Any, pins: Any, dirty: Any, changed: Any) -> tuple[Any, Any]:
    """Decrement the pin count of cache slots. Return the slots that no batch needs any more.

    Also returns their ``bounds`` by table. ``changed`` marks all ``slots`` as dirty.
    """
    unpinned = slots.copy()
    ends = bounds.copy()
    count = 0
    for table in range(len(bounds) - 1):
        for index in range(bounds[table], bounds[table + 1]):
            slot = slots[index]
            pins[slot] -= 1
            if changed:
                dirty[slot] = True
            if pins[slot] == 0:
                unpinned[count] = slot
                count += 1
        ends[table + 1] = count
    return unpinned[:count], ends


@numba.njit(cache=True, nogil=True)
def release(slots: Any, slot_of_row: Any, row_of_slot: Any, free: Any, num_free: Any) -> Any:
    """Push cache slots onto the stack ``free``, and return the new number of free slots."""
    for slot in slots:
        slot_of_row[row_of_slot[slot]] = NONE
        row_of_slot[slot] = NONE
        free[num_free] = slot
        num_free += 1
    return num_free


@numba.njit(inline="always")
def _unlink(slot: Any, before: Any, after: Any, level: Any, heads: Any, tails: Any) -> None:
    if before[slot] == NONE:
        heads[level[slot]] = after[slot]
    else:
        after[before[slot]] = after[slot]
    if after[slot] == NONE:
        tails[level[slot]] = before[slot]
    else:
        before[after[slot]] = before[slot]
    level[slot] = NONE


@numba.njit(cache=True, nogil=True)
def append(
    slots: Any, levels: Any, before: Any, after: Any, level: Any, heads: Any, tails: Any
) -> Any:
    """Move each cache slot to the end of the linked list ``levels[i]``.

    ``before``, ``after`` and ``level`` are indexed by slot. ``heads`` and ``tails`` are the first
    and last slots of the lists. Returns the number of slots that were not in a list before.
    """
    num_new = 0
    for index in range(len(slots)):
        slot = slots[index]
        if level[slot] == NONE:
            num_new += 1
        else:
            _unlink(slot, before, after, level, heads, tails)
        its_level = levels[index]
        tail = tails[its_level]
        before[slot], after[slot], level[slot] = tail, NONE, its_level
        tails[its_level] = slot
        if tail == NONE:
            heads[its_level] = slot
        else:
            after[tail] = slot
    return num_new


@numba.njit(cache=True, nogil=True)
def take_first(
    count: Any, lowest: Any, before: Any, after: Any, level: Any, heads: Any, tails: Any, taken: Any
) -> Any:
    """Move ``count`` cache slots from the starts of the lists, lowest level first, to ``taken``.

    Returns the lowest level that may still have slots.
    """
    for index in range(count):
        while heads[lowest] == NONE:
            lowest += 1
        taken[index] = heads[lowest]
        _unlink(heads[lowest], before, after, level, heads, tails)
    return lowest


Scalar = TypeVar("Scalar", bound=np.generic)
# Initial number of slots for rows that only batches in flight need.
_FIRST_SLOTS = 1024


@dataclass(frozen=True)
class Admitted:
    """The slots (row indices of the cache memory) of a batch's rows.

    Args:
        slot_of_id: slot of each id, int64 ``[num_ids]``.
        slots: distinct slots, int32, table by table in the order of the ids.
        bounds: start of each table in ``slots``, and the end, int64 ``[num_tables + 1]``.
        missing: slots whose rows must be read, int32, table by table.
        missing_bounds: start of each table in ``missing``, and the end, ``[num_tables + 1]``.
    """

    slot_of_id: NDArray[np.int64]
    slots: NDArray[np.int32]
    bounds: NDArray[np.int64]
    missing: NDArray[np.int32]
    missing_bounds: NDArray[np.int64]


class SlotPool:
    """Assigns slots (row indices of the cache memory) to the rows of several tables.

    Rows are numbered consecutively over all tables. A row has one slot even if several batches need
    it, so each batch sees the updates of earlier batches.

    Args:
        num_rows: number of rows of each table.
        rows: rows that are cached from the start, int64 ``[n]``, in slots 0, 1, 2, ...
        capacity: initial number of slots.

    Attributes:
        first_rows: number of the first row of each table, and the total number of rows.
        row_of_slot: row in each slot, or -1 if the slot is free.
        pins: number of batches in flight that need each slot.
        dirty: whether each slot's row differs from the backing store.
    """

    def __init__(self, num_rows: Sequence[int], rows: NDArray[np.int64], capacity: int) -> None:
        self.first_rows = np.concatenate([[0], np.cumsum(num_rows, dtype=np.int64)])
        self.num_slots = max(capacity, 1)
        self._capacity = capacity
        self._slot_of_row = np.full(self.first_rows[-1], NONE, np.int32)
        self._slot_of_row[rows] = np.arange(len(rows), dtype=np.int32)
        self.row_of_slot: NDArray[np.int64] = np.full(self.num_slots, NONE, np.int64)
        self.row_of_slot[: len(rows)] = rows
        self.pins: NDArray[np.int32] = np.zeros(self.num_slots, np.int32)
        self.dirty: NDArray[np.bool_] = np.zeros(self.num_slots, np.bool_)
        self._batch_of_slot: NDArray[np.int64] = np.zeros(self.num_slots, np.int64)
        self._num_batches = 0
        self._num_free = self.num_slots - len(rows)
        self._free = np.zeros(self.num_slots, np.int32)
        self._free[: self._num_free] = np.arange(self.num_slots - 1, len(rows) - 1, -1)

    def admit(self, ids: Sequence[NDArray[np.integer]], tables: Sequence[int]) -> Admitted:
        """Assign cache slots to a batch's rows, and pin the slots until ``unpin``.

        ``ids`` are the ids of each feature, and ``tables`` the table of each feature, ascending.
        """
        self._num_batches += 1
        num_ids = sum(map(len, ids))
        slot_of_id = np.empty(num_ids, np.int64)
        slots = np.empty(num_ids, np.int32)
        missing = np.empty(num_ids, np.int32)
        bounds = np.zeros(len(self.first_rows), np.int64)
        missing_bounds = np.zeros(len(self.first_rows), np.int64)
        num_slots = num_missing = done = 0
        for feature_ids, table in zip(ids, tables, strict=True):
            index, end = 0, len(feature_ids)
            while True:
                index, self._num_free, num_slots, num_missing = admit(
                    feature_ids,
                    index,
                    end,
                    self.first_rows[table],
                    self._num_batches,
                    self._slot_of_row,
                    self.row_of_slot,
                    self._batch_of_slot,
                    self._free,
                    self._num_free,
                    slot_of_id[done:],
                    slots,
                    num_slots,
                    missing,
                    num_missing,
                )
                if index == end:
                    break
                self._grow(at_most=num_ids - done - index)
            done += end
            bounds[table + 1] = num_slots
            missing_bounds[table + 1] = num_missing
        np.maximum.accumulate(bounds, out=bounds)
        np.maximum.accumulate(missing_bounds, out=missing_bounds)
        # Copies, so that the batch does not keep the memory for all ids alive.
        slots, missing = slots[:num_slots].copy(), missing[:num_missing].copy()
        pin(slots, self.pins)
        return Admitted(slot_of_id, slots, bounds, missing, missing_bounds)

    def unpin(
        self, admitted: Admitted, *, changed: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """End the use of a batch's cache slots. Return the slots that no other batch needs.

        Also returns the start of each table in these slots, and the end.
        """
        unpinned: NDArray[np.int32]
        unpinned, bounds = unpin(admitted.slots, admitted.bounds, self.pins, self.dirty, changed)
        return unpinned, bounds

    def release(self, slots: NDArray[np.int32]) -> None:
        """Free the cache slots of evicted rows."""
        self.dirty[slots] = False
        self._num_free = release(
            slots, self._slot_of_row, self.row_of_slot, self._free, self._num_free
        )

    def _grow(self, *, at_most: int) -> None:
        """Add up to ``at_most`` cache slots for rows of batches in flight."""
        more = min(max(self.num_slots - self._capacity, _FIRST_SLOTS), at_most)
        self._free = np.concatenate([self._free, np.empty(more, np.int32)])
        new = np.arange(self.num_slots + more - 1, self.num_slots - 1, -1, dtype=np.int32)
        self._free[self._num_free : self._num_free + more] = new
        self._num_free += more
        self.num_slots += more
        self.row_of_slot = _longer(self.row_of_slot, more, NONE)
        self.pins = _longer(self.pins, more, 0)
        self.dirty = _longer(self.dirty, more, 0)
        self._batch_of_slot = _longer(self._batch_of_slot, more, 0)


def _longer(values: NDArray[Scalar], more: int, fill: int) -> NDArray[Scalar]:
    return np.concatenate([values, np.full(more, fill, values.dtype)])
