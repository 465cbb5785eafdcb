"""The rows of the overlays are the most read ones of all ranks."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import torch

from recd_plugin_flexshard.runtime.retier import RecentAccesses
from recd_plugin_flexshard.tests.runtime.recent_accesses_cases import (
    Case,
    choose,
    choose_in_one_place,
)
from recd_plugins.testing.gloo import run_on_ranks

CASES = {
    "few rows read": Case(1000, num_hot=20, num_flex=30, accesses=8, skew=0.0),
    "many ties": Case(200, num_hot=15, num_flex=25, accesses=60, skew=0.5),
    "skewed": Case(500, num_hot=10, num_flex=40, accesses=3000, skew=1.2),
    "a common factor": Case(500, num_hot=10, num_flex=40, accesses=3000, skew=1.2, factor=4),
    "read more often than counts have classes": Case(
        3, num_hot=1, num_flex=1, accesses=80_000, skew=0.1
    ),
    "every row has a copy": Case(30, num_hot=10, num_flex=20, accesses=50, skew=1.0),
    "nothing read": Case(30, num_hot=3, num_flex=4, accesses=0, skew=1.0),
    "no hot rows": Case(50, num_hot=0, num_flex=7, accesses=100, skew=1.0),
}


@pytest.mark.parametrize(("name", "world_size"), zip(CASES, cycle((4, 2, 1)), strict=False))
def test_the_most_read_rows_are_chosen(name: str, world_size: int) -> None:
    seed = len(name)
    want = choose_in_one_place(world_size, CASES[name], seed)
    for got in run_on_ranks(choose, world_size, CASES[name], seed):
        assert got.hot.tolist() == want.hot.tolist()
        assert got.flex.tolist() == want.flex.tolist()
        assert got.accesses == want.accesses
        assert got.covered_before == want.covered_before
        assert got.covered_after == want.covered_after


def test_counts_are_bounded_and_the_heaviest_stay() -> None:
    bound = 64
    recent = RecentAccesses(bound)
    random = np.random.default_rng(0)
    heavy = np.arange(8)
    exact = np.zeros(100_000)
    for _ in range(50):
        keys = np.concatenate([np.repeat(heavy, 5), random.integers(8, 100_000, 60)])
        np.add.at(exact, keys, 1)
        recent.add(torch.from_numpy(keys))
    keys, counts = recent.take()
    assert len(keys) <= bound
    assert set(heavy) <= set(keys.tolist())
    assert (counts <= exact[keys]).all()
    assert (counts >= exact[keys] - exact.sum() / bound).all()
