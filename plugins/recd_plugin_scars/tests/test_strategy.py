"""What caches say of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planning.test_work import NOTHING, plan

from recd_plugin_scars.runtime.policies import TableCache
from recd_plugin_scars.strategy import CacheStrategy
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.data_profile import DataProfile, FeatureProfile
from recd_plugins.planning.step_cost import estimate_step_cost


@pytest.mark.parametrize(
    ("shards", "moved"),
    [([(1, 100, 8)], [0, 400]), ([(0, 25, 8), (1, 75, 8)], [100, 300]), ([(0, 100, 4)] * 2, [400])],
)
def test_backing_stores_move_rows_where_they_are(
    shards: list[tuple[int, int, int]], moved: list[int]
) -> None:
    known = DataProfile({"f": FeatureProfile(3.0)})
    caches = {"t": TableCache("lru", 0.5), "u": TableCache("lru", 0.5, folder=Path("u"))}
    tables = {
        name: SimpleNamespace(traffic=SimpleNamespace(bytes=num_bytes))
        for name, num_bytes in {"t": 400, "u": 7}.items()
    }
    expected: Any = SimpleNamespace(tables=tables)
    ranks = estimate_step_cost(
        [Table("t", ("f",), 100, 8, True)], plan("row_wise", *shards), known, NOTHING,
        batch_size=10, world_size=len(moved),
        parts=[CacheStrategy(caches, expected)],
    )  # fmt: skip
    assert [work.bytes_from_host for work in ranks] == moved
    assert not any(work.bytes_from_file for work in ranks)
