"""What a plan sends by tier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recd_plugins.planning.tiers import (
    TIERS,
    Cluster,
    CostOptions,
    TableDemand,
    TableTiers,
    plan_tiers,
    traffic,
)
from recd_plugins.planning.tiers.paper import CLUSTER, MODELS, OPTIONS

# Sent 10 times by a batch of 10 samples: 8 + 8 + 2 * 4 * .5 + 5 * .1 in all.
DEMAND = TableDemand(
    "t", 11, 4, np.array([0.8, 0.8, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), features=2
)


def three_tiers(cluster: Cluster, options: CostOptions = OPTIONS):
    plan = plan_tiers([DEMAND], cluster, "row_wise", options)
    table = TableTiers(DEMAND, 2, 4, 0.0, 0.0, hot_sent=16.0, flex_sent=20.0, cold_sent=5.0)
    return replace(plan, tables=(table,))


def test_bytes_by_tier():
    sent = traffic(three_tiers(Cluster(2, 2, 10)))
    assert list(sent) == list(TIERS)
    # 3 of 4 ranks are others; ids of 8 bytes; lengths of 4, 2 lists of 10 samples to each of them.
    assert sent["cold"].integer_bytes == 3 / 4 * 5 * 8 + 3 * 2 * 10 * 4
    assert sent["cold"].float_bytes == 3 / 4 * 5 * 4 * 4 * 2
    assert sent["hot"].float_bytes == 2 * 3 / 4 * 2 * 4 * 4
    assert sent["flex"].integer_bytes == 1 / 2 * 20 * 8
    assert sent["flex"].float_bytes == 1 / 2 * 20 * 4 * 4 * 2
    assert sent["flex_gradients"].float_bytes == 2 * 1 / 2 * (4 / 2) * 4 * 4
    assert sent["hot"].integer_bytes == sent["flex_gradients"].integer_bytes == 0
    assert {tier: (each.collective, each.group) for tier, each in sent.items()} == {
        "cold": ("all_to_all", "global"),
        "hot": ("all_reduce", "global"),
        "flex": ("all_to_all", "node"),
        "flex_gradients": ("all_reduce", "cross"),
    }
    assert sent["cold"].bytes == sent["cold"].integer_bytes + sent["cold"].float_bytes


def test_wires_of_half_the_bytes_carry_embeddings_alone():
    full = traffic(three_tiers(Cluster(2, 2, 10)))
    half = traffic(three_tiers(Cluster(2, 2, 10), replace(OPTIONS, wire_bytes=2)))
    for tier in ("cold", "flex"):
        assert half[tier].float_bytes == full[tier].float_bytes / 2
        assert half[tier].integer_bytes == full[tier].integer_bytes
    assert half["hot"] == full["hot"]


def test_one_rank_sends_nothing():
    sent = traffic(three_tiers(Cluster(1, 1, 10)))
    assert [each.bytes for each in sent.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_plan_sends_what_its_reduction_says(factor):
    model = MODELS["RM-2"]
    plan = plan_tiers([model.fitted(factor)], CLUSTER, "three_tier", OPTIONS)
    plain = traffic(plan_tiers([model.fitted()], CLUSTER, "row_wise", OPTIONS))
    sent = traffic(plan)
    left = sent["cold"].float_bytes / plain["cold"].float_bytes
    assert 1 - left == pytest.approx(plan.a2a_reduction)
    assert sent["cold"].seconds == plan.seconds.a2a_global
    assert sent["flex_gradients"].seconds == plan.seconds.ar_cross
    looked_up = sum(
        getattr(table, f"{tier}_sent") for table in plan.tables for tier in ("hot", "flex", "cold")
    )
    assert looked_up == pytest.approx(4096 * model.length / factor)
