"""Which row is in which slot of fast memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.runtime import slot_kernels

Scalar = TypeVar("Scalar", bound=np.generic)
# Slots for batches in flight, when the first one needs any.
_FIRST_SLOTS = 1024


@dataclass(frozen=True)
class Admitted:
    """The rows of a batch, all with a slot of their own.

    Args:
        slot_of_id: int64 ``[num_ids]``.
        slots: distinct ones, table by table, in the order in which the ids name them, int32.
        bounds: of the tables in ``slots``, ``[num_tables + 1]``.
        missing: those of ``slots`` whose rows have to be read, table by table, int32.
        missing_bounds: of the tables in ``missing``.
    """

    slot_of_id: NDArray[np.int64]
    slots: NDArray[np.int32]
    bounds: NDArray[np.int64]
    missing: NDArray[np.int32]
    missing_bounds: NDArray[np.int64]


class SlotPool:
    """Slots for the rows of several tables, which stand below each other.

    A row has one slot, whatever number of batches needs it: a batch that is admitted while another
    one changes the row sees the change.

    Args:
        num_rows: of each table.
        rows: that have a slot from the start, the first ones.
        capacity: how many rows stay, which have room from the start.

    Attributes:
        first_rows: of each table, and the number of all rows.
        row_of_slot: by slot, -1 where it is free.
        pins: by slot, how many admitted batches need it.
        dirty: by slot, whether the backing store has another value of its row.
    """

    def __init__(self, num_rows: Sequence[int], rows: NDArray[np.int64], capacity: int) -> None:
        self.first_rows = np.concatenate([[0], np.cumsum(num_rows, dtype=np.int64)])
        self.num_slots = max(capacity, 1)
        self._capacity = capacity
        self._slot_of_row = np.full(self.first_rows[-1], slot_kernels.NONE, np.int32)
        self._slot_of_row[rows] = np.arange(len(rows), dtype=np.int32)
        self.row_of_slot: NDArray[np.int64] = np.full(self.num_slots, slot_kernels.NONE, np.int64)
        self.row_of_slot[: len(rows)] = rows
        self.pins: NDArray[np.int32] = np.zeros(self.num_slots, np.int32)
        self.dirty: NDArray[np.bool_] = np.zeros(self.num_slots, np.bool_)
        self._batch_of_slot: NDArray[np.int64] = np.zeros(self.num_slots, np.int64)
        self._num_batches = 0
        self._num_free = self.num_slots - len(rows)
        self._free = np.zeros(self.num_slots, np.int32)
        self._free[: self._num_free] = np.arange(self.num_slots - 1, len(rows) - 1, -1)

    def admit(self, ids: Sequence[NDArray[np.integer]], tables: Sequence[int]) -> Admitted:
        """Pin the rows of a batch; those that are not there get a slot.

        Args:
            ids: of each feature, all of rows that its table has.
            tables: of each feature, ascending.
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
                index, self._num_free, num_slots, num_missing = slot_kernels.admit(
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
        slot_kernels.pin(slots, self.pins)
        return Admitted(slot_of_id, slots, bounds, missing, missing_bounds)

    def unpin(
        self, admitted: Admitted, *, changed: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """A batch is done with its rows.

        Args:
            admitted: the batch.
            changed: it gave the rows new values.

        Returns:
            The slots that no batch needs any more, table by table, and the bounds of the tables.
        """
        unpinned: NDArray[np.int32]
        unpinned, bounds = slot_kernels.unpin(
            admitted.slots, admitted.bounds, self.pins, self.dirty, changed
        )
        return unpinned, bounds

    def withdraw(self, admitted: Admitted) -> None:
        """A batch is not to be there after all; only the last one that was admitted."""
        slot_kernels.unpin(admitted.slots, admitted.bounds, self.pins, self.dirty, False)
        self.release(admitted.missing)

    def release(self, slots: NDArray[np.int32]) -> None:
        """Rows leave; their slots are free."""
        self.dirty[slots] = False
        self._num_free = slot_kernels.release(
            slots, self._slot_of_row, self.row_of_slot, self._free, self._num_free
        )

    def num_rows_of_tables(self, slots: NDArray[np.integer]) -> list[int]:
        """How many of the slots have a row of each table."""
        tables = np.searchsorted(self.first_rows, self.row_of_slot[slots], side="right") - 1
        counts: list[int] = np.bincount(tables, minlength=len(self.first_rows) - 1).tolist()
        return counts

    def _grow(self, *, at_most: int) -> None:
        """Double the slots that are not for rows that stay, or make as many as can be needed."""
        more = min(max(self.num_slots - self._capacity, _FIRST_SLOTS), at_most)
        self._free = np.concatenate([self._free, np.empty(more, np.int32)])
        new = np.arange(self.num_slots + more - 1, self.num_slots - 1, -1, dtype=np.int32)
        self._free[self._num_free : self._num_free + more] = new
        self._num_free += more
        self.num_slots += more
        self.row_of_slot = _longer(self.row_of_slot, more, slot_kernels.NONE)
        self.pins = _longer(self.pins, more, 0)
        self.dirty = _longer(self.dirty, more, 0)
        self._batch_of_slot = _longer(self._batch_of_slot, more, 0)


def _longer(values: NDArray[Scalar], more: int, fill: int) -> NDArray[Scalar]:
    return np.concatenate([values, np.full(more, fill, values.dtype)])
