"""Compiled loops over the slots of fast memory; ``slots.py`` and ``policies.py`` call them."""

from __future__ import annotations

from typing import Any

import numba

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
    """Give the rows of some ids of one table a slot each, as far as there are free ones.

    Args:
        ids: of the table's rows.
        first: where to start in ``ids``.
        end: where to end.
        first_row: of the table.
        batch: number of the batch, by which a slot knows that it was seen in it.
        slot_of_row: by row, ``NONE`` where it has none.
        row_of_slot: by slot.
        batch_of_slot: by slot, the last batch that needed it.
        free: stack of free slots.
        num_free: height of the stack.
        slot_of_id: filled by id.
        slots: the distinct slots so far.
        num_slots: of them.
        missing: those of them whose rows are not there yet.
        num_missing: of them.

    Returns:
        Where it ended, which is before ``end`` where no slot was free; ``num_free``, ``num_slots``
        and ``num_missing`` then.
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
    """One more batch needs these slots."""
    for slot in slots:
        pins[slot] += 1


@numba.njit(cache=True, nogil=True)
def unpin(slots: Any, bounds: Any, pins: Any, dirty: Any, changed: Any) -> tuple[Any, Any]:
    """One batch less needs these slots.

    Args:
        slots: of the batch, table by table.
        bounds: of the tables in ``slots``.
        pins: by slot.
        dirty: by slot, whether its row differs from the backing store's.
        changed: the batch changed the rows.

    Returns:
        The slots that no batch needs any more, and the bounds of the tables in them.
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
    """Make slots free; gives the height of the stack of free slots."""
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

    Args:
        slots: that stay.
        levels: of each, from now on.
        before: by slot, the one before it in its list, or ``NONE``.
        after: by slot, the one after it.
        level: by slot, ``NONE`` where it is in no list.
        heads: by level, the first slot of its list.
        tails: by level, the last one.

    Returns:
        How many were in no list before.
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
    """Take the first slots of the lowest levels out of their lists.

    Args:
        count: how many; there are as many.
        lowest: no list below this level has a slot.
        before: as ``append`` has it, and so the next four.
        after: likewise.
        level: likewise.
        heads: likewise.
        tails: likewise.
        taken: filled.

    Returns:
        The lowest level that may have a slot now.
    """
    for index in range(count):
        while heads[lowest] == NONE:
            lowest += 1
        taken[index] = heads[lowest]
        _unlink(heads[lowest], before, after, level, heads, tails)
    return lowest
