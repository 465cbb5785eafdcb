"""What a cache of a table may be, and the messages of what it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recd_plugin_scars.runtime.row_policy import RowPolicy
from recd_plugin_scars.runtime.spec import TableCache
from recd_plugins.errors import SetupError

HOT = np.array([4, 2, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mru", 0.5, HOT), r"the policy 'mru'; there are static, lfu, lru"),
        ((dict, 0.5), r"policy <class 'dict'>; there are static, lfu, lru, and subclasses of"),
        ((RowPolicy, 0.5), r"RowPolicy'>; .* that have a release"),
        (("lru", 1.5), r"load_factor 1.5.*from 0 to 1"),
        (("lru", -0.1), r"load_factor -0.1"),
        (("lru", float("nan")), r"load_factor nan"),
        (("static", 0.5), r"static and no hot_rows"),
        (("static", 0.5, np.array([0.5])), r"hot_rows.*float64"),
        (("static", 0.5, HOT[None]), r"hot_rows.*shape \(1, 3\)"),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TableCache(*arguments)


@pytest.mark.parametrize(
    ("policy", "hot_rows", "message"),
    [
        ("static", HOT, r"table t holds 5 rows \(load_factor 0.5 of 10\) and hot_rows names 3"),
        ("lru", np.array([4, 10]), r"hot_rows of table t names row 10, and the table has 10 rows"),
        ("lfu", np.array([4, -1]), r"hot_rows of table t names row -1"),
        ("lfu", np.array([4, 2, 4]), r"hot_rows of table t names row 4 twice"),
    ],
)
def test_hot_rows_of_another_table_are_refused(policy: Any, hot_rows: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TableCache(policy, 0.5, hot_rows).first_hot_rows("t", 10)


def test_hot_rows_from_the_start() -> None:
    cache = TableCache("static", 0.2, HOT)
    assert cache.num_cached_rows(10) == 2
    assert cache.first_hot_rows("t", 10).tolist() == [4, 2]
    assert TableCache("lru", 0.5).first_hot_rows("t", 10).tolist() == []
    assert TableCache("static", 0.0).first_hot_rows("t", 10).tolist() == []
