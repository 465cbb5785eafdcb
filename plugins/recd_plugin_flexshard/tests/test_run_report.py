"""What is said of tiers: observed next to predicted, and what moved."""

from __future__ import annotations

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from recd_plugin_flexshard.planning import (
    PAPER_FLAT,
    ClusterShape,
    CostOptions,
    Strategy,
    TableDemand,
    TierPlan,
    plan_tiers,
    traffic,
)
from recd_plugin_flexshard.run_report import TierReport
from recd_plugin_flexshard.runtime.retier import RetierReport

CLUSTER = ClusterShape(nodes=4, ranks_per_node=8, batch_size=4096, collectives=PAPER_FLAT)


def plan(strategy: Strategy, dedupe_factor: float = 1.0) -> TierPlan:
    popularity = np.arange(1, 100_001) ** -0.8
    probabilities = 50 * popularity / popularity.sum()
    demand = TableDemand("t", 100_000, 64, probabilities, dedupe_factor=dedupe_factor)
    return plan_tiers([demand], CLUSTER, strategy, CostOptions())


def shown(report: TierReport) -> str:
    text = StringIO()
    Console(file=text, width=80).print(*report.shown("mine"))
    return text.getvalue()


def test_bytes_are_those_of_all_ranks_and_plans() -> None:
    one = plan("three_tier")
    report = TierReport.of([one, one], {"cold": 1.0, "hot": 2.0})
    for tier in report.tiers:
        assert tier.predicted == pytest.approx(2 * 32 * traffic(one)[tier.tier].bytes)
    assert [tier.observed for tier in report.tiers] == [1, 2, 0, 0]
    row_wise = traffic(plan("row_wise"))["cold"].bytes
    assert report.row_wise == report.plain_row_wise == pytest.approx(2 * 32 * row_wise)
    observed, predicted = report.a2a_reduction
    assert observed == 1 - 1 / report.plain_row_wise
    assert predicted == 1 - report.tiers[0].predicted / report.plain_row_wise
    assert report.as_json()["tiers"]["hot"]["ratio"] == 2 / report.tiers[1].predicted


def test_what_is_saved_is_against_batches_that_are_not_deduplicated() -> None:
    report = TierReport.of([plan("two_tier", dedupe_factor=4.0)], None)
    plain = TierReport.of([plan("two_tier")], None)
    assert report.plain_row_wise == pytest.approx(plain.row_wise)
    assert report.row_wise < 0.3 * report.plain_row_wise
    assert "row-wise, plain" in shown(report)
    assert "row-wise, plain" not in shown(plain)


def test_of_many_retierings_the_last_are_told() -> None:
    retierings = [RetierReport(step, {("hot", "cold"): 3}, 0.5, 0.25) for step in range(1, 14)]
    report = TierReport.of([plan("two_tier")], None, retierings=retierings)
    first, *others = str(report.shown("")[1]).splitlines()
    assert first == "3 choices of tiers before these; --json has all"
    assert len(others) == 10
    assert "after step 13: 3 hot to cold" in others[-1]
    assert len(report.as_json()["retierings"]) == 13
