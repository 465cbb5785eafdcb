from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recd_plugin_scars.runtime.spec import TableCache
from recd_plugins.runtime.errors import SetupError

HOT = np.array([4, 2, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mru", 0.5, HOT), "no cache policy 'mru'"),
        (("lru", 1.5), "load_factor of a cache is 1.5"),
        (("lru", float("nan")), "load_factor of a cache is nan"),
        (("static", 0.5), "static needs hot_rows"),
    ],
)
def test_refused_caches(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TableCache(*arguments)


@pytest.mark.parametrize(
    ("policy", "hot_rows", "message"),
    [
        ("static", HOT, "table t holds 5 rows and hot_rows names 3"),
        ("lru", np.array([4, 10]), "hot_rows of table t names row 10, and the table has 10 rows"),
        ("lfu", np.array([4, 2, 4]), "hot_rows of table t names a row twice"),
    ],
)
def test_hot_rows_of_another_table_are_refused(policy: Any, hot_rows: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        TableCache(policy, 0.5, hot_rows).first_hot_rows("t", 10)


def test_hot_rows_from_the_start() -> None:
    cache = TableCache("static", 0.2, HOT)
    assert cache.first_hot_rows("t", 10).tolist() == [4, 2]
    assert TableCache("lru", 0.5).first_hot_rows("t", 10).tolist() == []
    assert TableCache("static", 0.0).first_hot_rows("t", 10).tolist() == []
