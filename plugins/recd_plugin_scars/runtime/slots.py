"""Compiled loops over slots of fast memory, and the pool of slots."""

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
    """Assign a slot to each row in ``ids[first:end]`` of one table while slots are free.

    Fills ``slot_of_id``. Appends distinct slots to ``slots``, and the slots of rows that must be
    read to ``missing``. ``batch_of_slot`` contains the last batch that needed each slot.

    Returns:
        The index where it stopped, less than ``end`` if slots ran out, and the new ``num_free``,
        ``num_slots`` and ``num_missing``.
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
    """Return the slots that no batch needs any more, and the bounds of each table in them."""
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
    """Free slots, and return the height of the stack of free slots."""
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
    """Move slots, in the given order, to the ends of the lists of their new levels.

    ``before``, ``after`` and ``level`` are indexed by slot; ``heads`` and ``tails`` are the list
    ends, indexed by level. Returns the number of slots that were not in a list before.
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
    """Move ``count`` slots from the fronts of the lowest levels' lists to ``taken``.

    Returns the lowest level that may still have slots.
    """
    for index in range(count):
        while heads[lowest] == NONE:
            lowest += 1
        taken[index] = heads[lowest]
        _unlink(heads[lowest], before, after, level, heads, tails)
    return lowest


Scalar = TypeVar("Scalar", bound=np.generic)
# Initial number of slots for batches in flight.
_FIRST_SLOTS = 1024


@dataclass(frozen=True)
class Admitted:
    """The rows of a batch, each with a slot.

    Args:
        slot_of_id: int64 ``[num_ids]``.
        slots: int32, distinct slots, table by table in the order of the ids.
        bounds: ranges of the tables in ``slots``, ``[num_tables + 1]``.
        missing: int32, slots whose rows must be read, table by table.
        missing_bounds: ranges of the tables in ``missing``, ``[num_tables + 1]``.
    """

    slot_of_id: NDArray[np.int64]
    slots: NDArray[np.int32]
    bounds: NDArray[np.int64]
    missing: NDArray[np.int32]
    missing_bounds: NDArray[np.int64]


class SlotPool:
    """Slots for the rows of several tables; row numbers run through all tables.

    A row has one slot, even if several batches need it. So a batch that is admitted while another
    one updates the row sees the update.

    Args:
        num_rows: number of rows of each table.
        rows: rows that occupy the first slots from the start.
        capacity: number of rows that stay; their slots are allocated at the start.

    Attributes:
        first_rows: first row of each table, followed by the total number of rows.
        row_of_slot: row in each slot, -1 if the slot is free.
        pins: number of admitted batches that need each slot.
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
        """Pin a batch's rows, with new slots for missing ones; ``tables`` ascend by feature."""
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
        """Unpin a batch. Return the slots that no batch needs, table by table, and their bounds."""
        unpinned: NDArray[np.int32]
        unpinned, bounds = unpin(admitted.slots, admitted.bounds, self.pins, self.dirty, changed)
        return unpinned, bounds

    def release(self, slots: NDArray[np.int32]) -> None:
        """Free the slots of evicted rows."""
        self.dirty[slots] = False
        self._num_free = release(
            slots, self._slot_of_row, self.row_of_slot, self._free, self._num_free
        )

    def _grow(self, *, at_most: int) -> None:
        """Double the slots for batches in flight, by at most ``at_most``."""
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
