"""Contract test suite for cache policies."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from recd_plugin_scars.runtime.policies import PolicyMaker, RowPolicy, ShardRows, SlotLists
from recd_plugin_scars.runtime.slots import Admitted, SlotPool

__all__ = ["RowPolicyContract"]

_ROWS = 200
_BATCHES = 60
_IDS = 24


class RowPolicyContract:
    """Contract tests of a cache policy. Subclass it and override the fixture ``policy``."""

    @pytest.fixture
    def policy(self) -> PolicyMaker:
        """Return the policy to test: a subclass of RowPolicy, or a ``functools.partial`` of it."""
        pytest.fail("override the fixture `policy` to return the policy under test")

    @pytest.mark.parametrize("in_flight", [1, 2, 3])
    @pytest.mark.parametrize("num_hot", [0, 5, 20])
    @pytest.mark.parametrize("capacity", [0, 1, 20, _ROWS])
    def test_rows_leave_in_time(
        self, policy: PolicyMaker, capacity: int, num_hot: int, in_flight: int
    ) -> None:
        num_hot = min(num_hot, capacity)
        _, leaves = _drive(policy, capacity, num_hot, in_flight)
        assert leaves == _drive(policy, capacity, num_hot, in_flight)[1], (
            "release is not deterministic: two runs on the same batches evicted different rows"
        )

    def test_counts_are_whole_numbers_by_name(self, policy: PolicyMaker) -> None:
        for name, count in _drive(policy, 20, 5, 2)[0].counts.items():
            assert isinstance(name, str)
            assert int(count) == count


def _drive(
    maker: PolicyMaker, capacity: int, num_hot: int, in_flight: int
) -> tuple[RowPolicy, list[list[int]]]:
    """Run a policy on random batches. Return the policy, and the slots evicted after each batch."""
    pool = SlotPool([_ROWS], np.arange(num_hot, dtype=np.int64), capacity)
    policy = maker(ShardRows(SlotLists(pool), 0, capacity, (0, num_hot)))
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
        leaves = policy.release(batch.slots, unpinned)
        assert np.issubdtype(leaves.dtype, np.integer), "release must return an integer array"
        assert len(np.unique(leaves)) == len(leaves), "release returned a slot twice"
        assert not policy.rows.pinned(leaves).any(), "release returned a slot that a batch needs"
        assert (pool.row_of_slot[leaves] >= 0).all(), "release returned a free slot"
        pool.release(leaves)
        left.append(leaves.tolist())
        held, needed = int((pool.row_of_slot >= 0).sum()), int((pool.pins != 0).sum())
        assert held - needed <= capacity, "more rows stay in the cache than its capacity"
    return policy, left
