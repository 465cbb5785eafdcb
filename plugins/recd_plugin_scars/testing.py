"""Test suite of row policies: subclass it and override the fixture ``policy``."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from recd_plugin_scars.runtime.row_policy import (
    PolicyMaker,
    RowPolicy,
    ShardRows,
    SlotLists,
    check_residents,
    class_of,
    made_by,
    released,
)
from recd_plugin_scars.runtime.slots import Admitted, SlotPool

__all__ = ["RowPolicyContract"]

_ROWS = 200
_BATCHES = 60
_IDS = 24


class RowPolicyContract:
    """Tests of a ``RowPolicy``, which is driven through batches of a table of 200 rows."""

    @pytest.fixture
    def policy(self) -> PolicyMaker:
        """What ``TableCache.policy`` takes."""
        pytest.fail("override the fixture `policy` to return the policy under test")

    @pytest.mark.parametrize("in_flight", [1, 2, 3])
    @pytest.mark.parametrize("num_hot", [0, 5, 20])
    @pytest.mark.parametrize("capacity", [0, 1, 20, _ROWS])
    def test_rows_leave_in_time(
        self, policy: PolicyMaker, capacity: int, num_hot: int, in_flight: int
    ) -> None:
        leaves = _drive(policy, capacity, min(num_hot, capacity), in_flight)
        assert leaves == _drive(policy, capacity, min(num_hot, capacity), in_flight), (
            "made again it lets other rows leave: ranks and runs would differ in what they fetch"
        )

    def test_counts_are_whole_numbers_by_name(self, policy: PolicyMaker) -> None:
        for name, count in _driven(policy, 20, 5, 2)[0].counts.items():
            assert isinstance(name, str)
            assert int(count) == count

    def test_it_has_a_name(self, policy: PolicyMaker) -> None:
        assert class_of(policy).name


def _drive(policy: PolicyMaker, capacity: int, num_hot: int, in_flight: int) -> list[list[int]]:
    return _driven(policy, capacity, num_hot, in_flight)[1]


def _driven(
    maker: PolicyMaker, capacity: int, num_hot: int, in_flight: int
) -> tuple[RowPolicy, list[list[int]]]:
    """The policy after some batches, and the slots that left after each."""
    pool = SlotPool([_ROWS], np.arange(num_hot, dtype=np.int64), capacity)
    policy = made_by(maker, "t", ShardRows(SlotLists(pool), 0, capacity, (0, num_hot)))
    generator = np.random.default_rng(0)
    waiting = deque[Admitted]()
    left = []
    for _ in range(_BATCHES):
        ids = np.minimum(generator.zipf(1.3, generator.integers(_IDS)), _ROWS) - 1
        waiting.append(pool.admit([ids], [0]))
        if len(waiting) < in_flight:
            continue
        batch = waiting.popleft()
        unpinned, _ = pool.unpin(batch, changed=True)
        leaves = released(policy, "t", batch.slots, unpinned)
        pool.release(leaves)
        left.append(leaves.tolist())
        held, needed = int((pool.row_of_slot >= 0).sum()), int((pool.pins != 0).sum())
        check_residents(policy, "t", held, needed)
    return policy, left
