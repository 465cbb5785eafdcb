"""Compiled loops over the slots of fast memory; ``slots.py`` and ``policies.py`` call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

#: In place of a slot: none; of a row: none.
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
    """Give the rows of ``ids[first:end]`` of one table a slot each, while there are free ones.

    Fills ``slot_of_id``; appends distinct slots to ``slots`` and those of rows that are not there
    yet to ``missing``. ``batch_of_slot`` has the last batch that needed a slot.

    Returns:
        The end, before ``end`` if no slot was free; ``num_free``, ``num_slots`` and
        ``num_missing`` then.
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
    """Return the slots that no batch needs any more, and the bounds of the tables in them."""
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
    """Make slots free; return the height of the stack of free slots."""
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
    """Move slots to the ends of the lists of their new levels, in this order.

    ``before``, ``after`` and ``level`` are links by slot; ``heads`` and ``tails`` the ends by
    level. Returns the number of slots that were in no list before.
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
    """Take the first ``count`` slots of the lowest levels out of their lists, into ``taken``.

    Returns the lowest level that may have a slot then.
    """
    for index in range(count):
        while heads[lowest] == NONE:
            lowest += 1
        taken[index] = heads[lowest]
        _unlink(heads[lowest], before, after, level, heads, tails)
    return lowest


Scalar = TypeVar("Scalar", bound=np.generic)
# Slots for batches in flight, when the first one needs any.
_FIRST_SLOTS = 1024


@dataclass(frozen=True)
class Admitted:
    """The rows of a batch, each with a slot.

    Args:
        slot_of_id: int64 ``[num_ids]``.
        slots: distinct slots, table by table, in the order of the ids, int32.
        bounds: of the tables in ``slots``, ``[num_tables + 1]``.
        missing: slots whose rows have to be read, table by table, int32.
        missing_bounds: of the tables in ``missing``.
    """

    slot_of_id: NDArray[np.int64]
    slots: NDArray[np.int32]
    bounds: NDArray[np.int64]
    missing: NDArray[np.int32]
    missing_bounds: NDArray[np.int64]


class SlotPool:
    """Slots for the rows of several tables, which stand below each other.

    A row has one slot, however many batches need it: a batch that is admitted while another one
    changes the row sees the change.

    Args:
        num_rows: of each table.
        rows: rows that have the first slots from the start.
        capacity: number of rows that stay, for which there is room from the start.

    Attributes:
        first_rows: of each table, and the number of all rows.
        row_of_slot: by slot, -1 where it is free.
        pins: by slot, number of admitted batches that need it.
        dirty: by slot, whether the backing store has another value of its row.
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
        """Pin the rows of a batch, and give missing ones a slot; ``tables`` ascend by feature."""
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
        # Copies, as the batch lives on and the memory for all ids need not.
        slots, missing = slots[:num_slots].copy(), missing[:num_missing].copy()
        pin(slots, self.pins)
        return Admitted(slot_of_id, slots, bounds, missing, missing_bounds)

    def unpin(
        self, admitted: Admitted, *, changed: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Unpin a batch; return the slots that no batch needs, table by table, and their bounds."""
        unpinned: NDArray[np.int32]
        unpinned, bounds = unpin(admitted.slots, admitted.bounds, self.pins, self.dirty, changed)
        return unpinned, bounds

    def withdraw(self, admitted: Admitted) -> None:
        """Take back the batch that was admitted last."""
        unpin(admitted.slots, admitted.bounds, self.pins, self.dirty, False)
        self.release(admitted.missing)

    def release(self, slots: NDArray[np.int32]) -> None:
        """Free the slots of rows that leave."""
        self.dirty[slots] = False
        self._num_free = release(
            slots, self._slot_of_row, self.row_of_slot, self._free, self._num_free
        )

    def num_rows_of_tables(self, slots: NDArray[np.integer]) -> list[int]:
        """Return the number of slots with a row of each table."""
        tables = np.searchsorted(self.first_rows, self.row_of_slot[slots], side="right") - 1
        counts: list[int] = np.bincount(tables, minlength=len(self.first_rows) - 1).tolist()
        return counts

    def _grow(self, *, at_most: int) -> None:
        """Double the slots that are not for rows that stay, by at most ``at_most``."""
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
