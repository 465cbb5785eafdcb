"""What tiers of rows say of a step is what their plan predicts."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from tests.planning.test_work import NOTHING, plan

from recd_plugin_flexshard.planning import (
    ClusterShape,
    Collective,
    Collectives,
    CostOptions,
    TableDemand,
    plan_tiers,
    traffic,
)
from recd_plugin_flexshard.planning.plan import LENGTH_BYTES, cold_size_bytes, flex_size_bytes
from recd_plugin_flexshard.strategy import TieredStrategy
from recd_plugins.interfaces import Table
from recd_plugins.interfaces.data_profile import DataProfile, DistinctIds, FeatureProfile
from recd_plugins.planning.step_cost import estimate_step_cost


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("sync", ["dense", "sparse"])
def test_tiers_send_what_their_plan_predicts(
    sync: Literal["dense", "sparse"], coalesce: bool
) -> None:
    """4 ranks as 2 nodes: the same bytes as ``tiers.traffic``, apart from sizes told before."""
    weights = 1 / np.arange(1.0, 101)
    demand = TableDemand("t", 100, 8, 3 * weights / weights.sum(), features=1)
    slow, fast = Collective(1e9), Collective(1e12)
    cluster = ClusterShape(2, 2, 10, Collectives(slow, fast, fast, fast))
    options = CostOptions(memory_multiplier=1.5, memory_ratio=1.2, sync=sync, coalesce=coalesce)
    plan_of_tiers = plan_tiers([demand], cluster, "three_tier", options)
    (tiers,) = plan_of_tiers.tables
    assert min(tiers.hot, tiers.flex, tiers.cold) > 0
    row_wise = plan("row_wise", *((rank, 25, 8) for rank in range(4)))
    sent = traffic(plan_of_tiers)
    ids = tiers.hot_sent + tiers.flex_sent + tiers.cold_sent
    distinct = {"t": DistinctIds((10,), (ids,))} if coalesce else {}
    known = DataProfile({"f": FeatureProfile(3.0)}, distinct=distinct)
    ranks = estimate_step_cost(
        [Table("t", ("f",), 100, 8, False)], row_wise, known, NOTHING,
        batch_size=10, world_size=4, local_world_size=2, parts=[TieredStrategy(plan_of_tiers)],
    )  # fmt: skip
    for work in ranks:
        assert work.ids_looked_up == pytest.approx(ids)  # as without tiers
        hot, flex = sent["hot"].bytes, sent["flex_gradients"].bytes
        exchanged = work.bytes_in_node + work.bytes_across_nodes
        if sync == "dense":
            # Links carry the flex rows of both ranks of a node.
            assert work.bytes_reduced == pytest.approx(hot + 2 * flex)
        else:
            assert work.bytes_reduced == 0
            exchanged -= hot + flex
        sizes = cold_size_bytes(plan_of_tiers) + flex_size_bytes(plan_of_tiers)
        sizes += 3 * LENGTH_BYTES * coalesce  # one length a feature tells how many ids come
        assert exchanged == pytest.approx(sent["cold"].bytes + sent["flex"].bytes - sizes)
        assert work.collectives == (8 if sync == "dense" else 8 + 3 + 2)
