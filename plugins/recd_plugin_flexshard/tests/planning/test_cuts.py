"""FlexShard's cuts: the reference cases, several tables, budgets, and what cannot be kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks._flexshard_paper import CLUSTER, MODELS, OPTIONS

from recd_plugin_flexshard.planning import (
    PAPER_FLAT,
    ClusterShape,
    CostOptions,
    TableDemand,
    plan_tiers,
)
from recd_plugin_flexshard.planning.cuts import Cuts
from recd_plugin_flexshard.planning.plan import _model
from recd_plugins.interfaces.data_profile import DistinctIds
from recd_plugins.runtime.errors import SetupError

TIME = CostOptions()


def capped_zipf(num_rows: int, exponent: float, length: float) -> TableDemand:
    """``p_i = min(1, C i^-z)``, of ``length`` in sum."""
    weights = np.arange(1, num_rows + 1.0) ** -exponent
    low, high = 0.0, length
    for _ in range(100):
        middle = (low + high) / 2
        enough = np.minimum(1, middle * weights).sum() >= length
        low, high = (low, middle) if enough else (middle, high)
    return TableDemand("t", num_rows, 256, np.minimum(1, high * weights))


FLAT = capped_zipf(10**6, 0.8, 50)
STEEP = capped_zipf(10**6, 1.2, 5)


@pytest.mark.parametrize(("demand", "hot"), [(FLAT, 13279), (STEEP, 2979)])
def test_two_tiers_take_the_memory_of_row_wise_tables(demand, hot):
    plan = plan_tiers([demand], CLUSTER, "two_tier", TIME)
    assert plan.tables[0].hot == pytest.approx(hot, abs=1)
    assert plan.a2a_reduction == pytest.approx(plan.tables[0].hot_share, abs=1e-9)
    assert plan.memory_bytes == pytest.approx(plan.row_wise_memory_bytes, rel=1e-4)


@pytest.mark.parametrize("strategy", ["two_tier", "three_tier", "joint"])
def test_a_budget_below_row_wise_sharding(strategy):
    model = _model([FLAT], CLUSTER, TIME)
    hot = model.hot_in_memory(model.costs.row_wise_static)
    least = model.memory(Cuts(hot, hot))
    plan = plan_tiers([FLAT], CLUSTER, strategy, CostOptions(memory_bytes=least))
    assert plan.memory_bytes == pytest.approx(least)
    with pytest.raises(SetupError, match=f"{least:,.0f} bytes on each rank"):
        plan_tiers([FLAT], CLUSTER, strategy, CostOptions(memory_bytes=least * 0.999))


@pytest.mark.parametrize(
    ("demand", "hot", "flex", "covered"),
    [(FLAT, 2491, 53417, 0.53569), (STEEP, 245, 19180, 0.92828)],
)
def test_three_tiers(demand, hot, flex, covered):
    plan = plan_tiers([demand], CLUSTER, "three_tier", CostOptions(minimise="bytes"))
    (table,) = plan.tables
    assert table.hot == pytest.approx(hot, abs=1)
    assert table.flex == pytest.approx(flex, abs=1)
    assert 1 - table.cold_share == pytest.approx(covered, abs=1e-4)
    assert plan.memory_bytes <= plan.row_wise_memory_bytes


@pytest.mark.parametrize("name", MODELS)
def test_the_fitted_tables_have_the_rows_and_coverages_of_table_5(name):
    model = MODELS[name]
    demand = model.fitted()
    assert demand.length == pytest.approx(model.length, rel=1e-9)
    (two,) = plan_tiers([demand], CLUSTER, "two_tier", OPTIONS).tables
    assert two.hot == pytest.approx(model.two_tier_rows, abs=2)
    assert two.hot_share == pytest.approx(model.two_tier_covered, abs=1e-3)
    (three,) = plan_tiers([demand], CLUSTER, "three_tier", OPTIONS).tables
    assert three.hot == model.hot_rows
    assert three.hot_share == pytest.approx(model.hot_covered, abs=1e-6)
    assert three.flex == pytest.approx(model.flex_rows, rel=0.012 if name == "RM-2" else 0.0025)
    assert three.flex_share == pytest.approx(model.flex_covered, abs=1e-3)


def test_tables_are_cut_as_their_merged_rows_would_be():
    rng = np.random.default_rng(0)
    tables, merged = [], []
    for index, factor in enumerate((1.0, 2.0, 1.0)):
        p = np.sort(rng.random(1000 + index) ** 6)[::-1].copy()
        tables.append(TableDemand(f"t{index}", len(p), 16, p, dedupe_factor=factor))
        merged += [(row / factor, index) for row in p]
    merged.sort(key=lambda each: (-each[0], each[1]))
    cluster = ClusterShape(2, 4, 300, PAPER_FLAT)
    for ratio in (0.98, 1.0, 2.0, 9.0):
        options = CostOptions(minimise="bytes", memory_ratio=ratio)
        plan = plan_tiers(tables, cluster, "two_tier", options)
        rows = sum(table.hot for table in plan.tables)
        expected = [sum(index == of for _, of in merged[:rows]) for index in range(3)]
        assert [table.hot for table in plan.tables] == expected
        # Memory by the strategy table: multiplier 6, one activation of two saved.
        sent = 300 * sum(p for p, _ in merged)
        hot = 300 * sum(p for p, _ in merged[:rows])
        static = 6 * rows + (len(merged) - rows) / 8
        assert plan.memory_bytes == pytest.approx((static + 2 * sent - hot) * 16 * 4)


def test_bins_and_tails_are_cut_in_rows():
    one_by_one = TableDemand("t", 100, 8, np.array([0.9] * 10 + [0.2] * 30 + [0.01] * 60))
    tail: dict[str, Any] = {"tail_rows": 60, "tail_probability": 0.01}
    binned = TableDemand("t", 100, 8, np.array([0.9, 0.2]), repeats=np.array([10, 30]), **tail)
    cluster = ClusterShape(2, 2, 64, PAPER_FLAT)
    for strategy in ("two_tier", "three_tier", "joint"):
        for ratio in (0.9, 1.0, 1.3, 3.0):
            options = CostOptions(memory_ratio=ratio, minimise="bytes")
            plans = [plan_tiers([t], cluster, strategy, options) for t in (one_by_one, binned)]
            first, second = ((p.tables[0].hot, p.tables[0].flex, p.a2a_reduction) for p in plans)
            assert first == pytest.approx(second)


def test_accesses_that_come_together_have_a_row_sent_once():
    options = CostOptions(coalesce=True, sync="auto", memory_ratio=2.0)
    scattered = capped_zipf(10**5, 1.2, 5)
    clustered = replace(scattered, distinct=DistinctIds((1024, 4096), (300.0, 1000.0)))
    demands = (scattered, clustered)
    alone, together = (plan_tiers([d], CLUSTER, "row_wise", options).tables[0] for d in demands)
    assert alone.cold_sent > 3 * 1000
    assert together.cold_sent == pytest.approx(1000, rel=1e-3)
    plans = [plan_tiers([d], CLUSTER, "joint", options) for d in demands]
    copied = [plan.tables[0].hot + plan.tables[0].flex for plan in plans]
    assert copied[1] < copied[0]
    # Of rows that every batch reads, too.
    hot = TableDemand("t", 200, 4, np.full(200, 0.02), distinct=DistinctIds((4096,), (150.0,)))
    (table,) = plan_tiers([hot], CLUSTER, "row_wise", options).tables
    assert table.cold_sent == pytest.approx(150, rel=1e-3)
    # A batch has no more of them than independent accesses have.
    capped = replace(scattered, distinct=DistinctIds((4096,), (1e6,)))
    assert plan_tiers([capped], CLUSTER, "joint", options).tables[0].hot == plans[0].tables[0].hot
