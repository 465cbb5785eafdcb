"""Slots and policies against plain Python: which rows are there, and which leave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugin_scars.runtime.policies import (
    BUILT_IN,
    CachePolicy,
    RowPolicy,
    ShardRows,
    SlotLists,
)
from recd_plugin_scars.runtime.slots import Admitted, SlotPool

TABLES = (5, 9)
Row = tuple[int, int]


class Model:
    def __init__(self, policy: CachePolicy, capacity: int, hot: Sequence[int]) -> None:
        self.policy, self.capacity = policy, capacity
        self.hot = [(table, row) for table in range(len(TABLES)) for row in hot]
        self.kept: list[OrderedDict[Row, int]] = [
            OrderedDict((row, 0) for row in reversed(self.hot) if row[0] == table)
            for table in range(len(TABLES))
        ]
        self.uses = {(table, row): 0 for table, rows in enumerate(TABLES) for row in range(rows)}
        self.pinned: list[list[Row]] = []

    @property
    def resident(self) -> set[Row]:
        kept = {row for table in self.kept for row in table}
        return kept | {row for rows in self.pinned for row in rows}

    def admit(self, rows: list[Row]) -> tuple[int, int]:
        misses = len(set(rows) - self.resident)
        self.pinned.append(list(OrderedDict.fromkeys(rows)))
        return len(set(rows)) - misses, misses

    def release(self, index: int) -> None:
        rows = self.pinned.pop(index)
        needed = {row for others in self.pinned for row in others}
        for row in rows:
            self.uses[row] += 1
        if self.policy == "static":
            return
        for row in rows:
            if row not in needed:
                kept = self.kept[row[0]]
                kept.pop(row, None)
                kept[row] = self.uses[row] if self.policy == "lfu" else 0
        for kept in self.kept:
            while len(kept) > self.capacity:
                kept.pop(min(kept, key=lambda row: kept[row]))  # the first of several


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(["static", "lru", "lfu"]),
    capacity=st.integers(0, 5),
    with_hot=st.booleans(),
    actions=st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=8), st.integers(0, 3)
        ),
        max_size=40,
    ),
)
def test_rows_stay_and_leave_as_defined(
    policy: CachePolicy, capacity: int, with_hot: bool, actions: list[list[Row] | int]
) -> None:
    hot = list(range(4, 4 - capacity, -1)) if with_hot or policy == "static" else []
    model = Model(policy, capacity, hot)
    hot_rows = np.array([row + 5 * table for table, row in model.hot], np.int64)
    pool = SlotPool(TABLES, hot_rows, capacity * len(TABLES))
    lists = SlotLists(pool)
    policies = [
        BUILT_IN[policy](
            ShardRows(lists, table, capacity, (table * len(hot), (table + 1) * len(hot)))
        )
        for table in range(len(TABLES))
    ]
    admitted: list[Admitted] = []
    for action in actions:
        if isinstance(action, list):
            rows = sorted(action, key=lambda row: row[0])  # feature by feature
            admitted.append(_admit(pool, rows))
            hits, misses = model.admit(rows)
            assert (len(admitted[-1].slots) - misses, len(admitted[-1].missing)) == (hits, misses)
        elif admitted:
            index = action % len(admitted)
            _release(pool, policies, admitted.pop(index))
            model.release(index)
        assert _resident(pool) == model.resident


def _admit(pool: SlotPool, rows: list[Row]) -> Admitted:
    ids = [np.array([row for table, row in rows if table == each], np.int64) for each in (0, 1)]
    admitted = pool.admit(ids, [0, 1])
    # Each id got the slot of its row, and each row one slot.
    wanted = [row + 5 * table for table, row in rows]
    assert pool.row_of_slot[admitted.slot_of_id].tolist() == wanted
    assert len(np.unique(admitted.slots)) == len(admitted.slots) == len(set(rows))
    assert set(admitted.slot_of_id.tolist()) == set(admitted.slots.tolist())
    tables = [table for table, _ in OrderedDict.fromkeys(rows)]
    assert np.diff(admitted.bounds).tolist() == [tables.count(0), tables.count(1)]
    return admitted


def _release(pool: SlotPool, policies: Sequence[RowPolicy], admitted: Admitted) -> None:
    unpinned, bounds = pool.unpin(admitted, changed=True)
    assert pool.dirty[admitted.slots].all()
    for table, policy in enumerate(policies):
        used = admitted.slots[admitted.bounds[table] : admitted.bounds[table + 1]]
        leaves = policy.release(used, unpinned[bounds[table] : bounds[table + 1]])
        assert not pool.pins[leaves].any()
        pool.release(leaves)


def _resident(pool: SlotPool) -> set[Row]:
    rows = pool.row_of_slot[pool.row_of_slot >= 0].tolist()
    assert len(rows) == len(set(rows))
    return {(0, row) if row < 5 else (1, row - 5) for row in rows}


@pytest.mark.parametrize("num_rows", [1, 1024, 5000])
def test_a_pool_grows_to_what_a_batch_needs(num_rows: int) -> None:
    pool = SlotPool([num_rows], np.empty(0, np.int64), 0)
    admitted = pool.admit([np.arange(num_rows)], [0])
    assert pool.row_of_slot[admitted.slot_of_id].tolist() == list(range(num_rows))
    assert num_rows <= pool.num_slots <= max(2 * num_rows, 1 + num_rows)


def test_rows_that_stay_have_room_from_the_start() -> None:
    pool = SlotPool([5000], np.array([7, 3]), 3000)
    assert pool.num_slots == 3000
    admitted = pool.admit([np.arange(2000)], [0])
    assert admitted.slot_of_id[:4].tolist() == [2, 3, 4, 1]
    assert pool.num_slots == 3000
