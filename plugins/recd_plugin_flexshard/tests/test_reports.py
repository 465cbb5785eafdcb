from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import _flexshard_paper as paper
from recd_plugin_flexshard.plan_report import TiersReport, render, study_entry
from recd_plugin_flexshard.planning import CostOptions, TableDemand, TierPlan, plan_tiers, traffic
from recd_plugin_flexshard.planning.plan import Strategy
from recd_plugin_flexshard.run_report import TierReport
from recd_plugin_flexshard.table_plan import collectives_of
from recd_plugins.planning.topologies import load_topology

SPEC = load_topology("zionex-a100-40g")
COLLECTIVES = collectives_of(SPEC.collective_rates)


def printed(*parts: Any) -> str:
    text = StringIO()
    Console(file=text, width=80).print(*parts)
    assert "…" not in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 80
    return text.getvalue()


def test_it_shows_the_papers_tables_5_and_6() -> None:
    cluster = replace(paper.CLUSTER, collectives=COLLECTIVES)
    plan = plan_tiers([paper.MODELS["RM-2"].fitted()], cluster, "three_tier", paper.OPTIONS)
    entry = study_entry("sharding[0]", "flexshard.three_tier", plan)
    rm_2 = TiersReport("zionex-a100-40g", SPEC, 64, [entry])
    lines = [line.split() for line in printed(render(rm_2)).splitlines()]
    (row,) = (line for line in lines if line[:1] == ["RM-2"])
    assert row[:5] == ["RM-2", "30,000,000", "959.6", "128,736", "63.9%"]
    (marked,) = (line for line in lines if line[:3] == ["three", "tiers", "*"] and "%" in line[4])
    assert marked[3:5] == row[3:5]
    assert marked[7] == "85.7%"
    (total,) = (line for line in lines if line[:1] == ["total"])
    # Two tiers take less time than three where nothing is hidden: table 6.
    assert [float(value) for value in total[1:]] == pytest.approx([322, 84.6, 105.6, 105.6], abs=1)
    found = json.loads(json.dumps(rm_2.as_json()))
    assert found["topology"]["world_size"] == 32
    (one,) = found["entries"]
    assert one["tables"][0]["hot"] == 128_736
    assert one["tables"][0]["hot_share"] == pytest.approx(0.639, abs=1e-3)
    assert list(one["strategies"]) == ["two_tier", "three_tier", "joint"]
    assert one["strategies"]["three_tier"]["a2a_reduction"] == plan.a2a_reduction
    seconds = one["row_wise"]["seconds"]
    assert seconds["total"] == seconds["exposed"] == seconds["a2a_global"]


def test_one_node_has_no_three_tiers() -> None:
    one_node = replace(paper.CLUSTER, nodes=1)
    small = plan_tiers([paper.MODELS["RM-3"].fitted()], one_node, "two_tier")
    assert list(study_entry("", "", small).alternatives) == ["two_tier", "joint"]


def plan(strategy: Strategy, dedupe_factor: float = 1.0) -> TierPlan:
    popularity = np.arange(1, 100_001) ** -0.8
    probabilities = 50 * popularity / popularity.sum()
    demand = TableDemand("t", 100_000, 64, probabilities, dedupe_factor=dedupe_factor)
    return plan_tiers([demand], paper.CLUSTER, strategy, CostOptions())


def test_bytes_of_a_run_are_those_of_all_ranks_and_plans() -> None:
    one = plan("three_tier")
    found = TierReport.of([one, one], {"cold": 1.0, "hot": 2.0})
    for tier in found.tiers:
        assert tier.predicted == pytest.approx(2 * 32 * traffic(one)[tier.tier].bytes)
    assert [tier.observed for tier in found.tiers] == [1, 2, 0, 0]
    row_wise = traffic(plan("row_wise"))["cold"].bytes
    assert found.row_wise == found.plain_row_wise == pytest.approx(2 * 32 * row_wise)
    observed, predicted = found.a2a_reduction
    assert observed == 1 - 1 / found.plain_row_wise
    assert predicted == 1 - found.tiers[0].predicted / found.plain_row_wise
    assert found.as_json()["tiers"]["hot"]["ratio"] == 2 / found.tiers[1].predicted
    # What is saved is against batches that are not deduplicated.
    deduplicated = TierReport.of([plan("two_tier", dedupe_factor=4.0)], None)
    assert deduplicated.plain_row_wise == pytest.approx(found.plain_row_wise / 2)
    assert deduplicated.row_wise < 0.3 * deduplicated.plain_row_wise
    assert "row-wise, plain" in printed(*deduplicated.shown("mine"))
