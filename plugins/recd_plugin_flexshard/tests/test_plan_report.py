"""The report of `recd plan --tiers`, of FlexShard's RM-2 and small tables."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from benchmarks import _flexshard_paper as paper
from recd_plugin_flexshard.plan_report import (
    EntryTiers,
    TiersReport,
    render,
    study_entry,
)
from recd_plugin_flexshard.planning import ClusterShape, CostOptions, TableDemand, plan_tiers
from recd_plugin_flexshard.planning.plan import Strategy
from recd_plugin_flexshard.table_plan import collectives_of
from recd_plugins.planning.topologies import load_topology

SPEC = load_topology("zionex-a100-40g")
COLLECTIVES = collectives_of(SPEC.collective_rates)
SMALL = ClusterShape(nodes=2, ranks_per_node=2, batch_size=64, collectives=COLLECTIVES)


def table(name: str, rows: int, length: float) -> TableDemand:
    weights = np.arange(1, rows + 1) ** -1.2
    return TableDemand(name, rows, 16, weights / weights.sum() * length)


def entry(
    strategy: Strategy = "three_tier",
    cluster: ClusterShape = SMALL,
    tables: int = 2,
    what_if: dict[str, float] | None = None,
) -> EntryTiers:
    demands = [table(f"t_{index}", 1000 * (index + 1), 10.0 + index) for index in range(tables)]
    plan = plan_tiers(demands, cluster, strategy, CostOptions(overlap=0.25))
    return study_entry("sharding[0]", f"flexshard.{strategy}", plan, what_if or {})


@pytest.fixture(scope="module")
def rm_2() -> EntryTiers:
    cluster = replace(paper.CLUSTER, collectives=COLLECTIVES)
    demand = paper.MODELS["RM-2"].fitted()
    plan = plan_tiers([demand], cluster, "three_tier", paper.OPTIONS)
    return study_entry("sharding[0]", "flexshard.three_tier", plan, {})


def report(*entries: EntryTiers) -> TiersReport:
    return TiersReport("zionex-a100-40g", SPEC, 64, {}, entries)


def text(*entries: EntryTiers, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(render(report(*entries)))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_it_shows_the_papers_tables_5_and_6(rm_2: EntryTiers) -> None:
    lines = [line.split() for line in text(rm_2).splitlines()]
    (row,) = (line for line in lines if line[:1] == ["RM-2"])
    assert row[:5] == ["RM-2", "30,000,000", "959.6", "128,736", "63.9%"]
    (marked,) = (line for line in lines if line[:3] == ["three", "tiers", "*"] and "%" in line[4])
    assert marked[3:5] == row[3:5]
    assert marked[7] == "85.7%"
    (two,) = (line for line in lines if line[:3] == ["two", "tiers", "507,072"])
    assert two[-1] == "1.00"
    (total,) = (line for line in lines if line[:1] == ["total"])
    # Two tiers take less time than three where nothing is hidden: table 6.
    assert [float(value) for value in total[1:]] == pytest.approx([322, 84.6, 105.6, 105.6], abs=1)


@pytest.mark.parametrize("strategy", ["two_tier", "joint"])
def test_nothing_is_cut_off_in_80_columns(strategy: Strategy) -> None:
    shown = text(entry(strategy))
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_json_has_everything(rm_2: EntryTiers) -> None:
    found = json.loads(json.dumps(report(rm_2).as_json()))
    assert found["topology"]["world_size"] == 32
    assert found["topology"]["collectives_measured"]
    (one,) = found["entries"]
    assert one["tables"][0]["hot"] == 128_736
    assert one["tables"][0]["hot_share"] == pytest.approx(0.639, abs=1e-3)
    strategies = one["strategies"]
    assert list(strategies) == ["two_tier", "three_tier", "joint"]
    assert strategies["three_tier"]["a2a_reduction"] == rm_2.plan.a2a_reduction
    assert strategies["two_tier"]["memory_bytes"] <= one["row_wise"]["memory_bytes"]
    seconds = one["row_wise"]["seconds"]
    assert seconds["total"] == seconds["exposed"] == seconds["a2a_global"]
    assert one["options"]["memory_multiplier"] == 6


def test_one_node_has_no_three_tiers() -> None:
    found = entry("two_tier", replace(SMALL, nodes=1))
    assert list(found.alternatives) == ["two_tier", "joint"]
    assert "no three tiers: three_tier keeps a flex row" in text(found)


def test_what_if_stands_in_for_the_options_of_the_entry() -> None:
    usual, more = entry(), entry(what_if={"memory_ratio": 1.5, "overlap": 0.75})
    assert usual.plan.options.overlap == 0.25
    assert more.plan.options.overlap == 0.75
    assert more.alternatives["joint"].options.memory_ratio == 1.5
    assert more.plan.a2a_reduction >= usual.plan.a2a_reduction
    shown = " ".join(text(more).split())
    assert "within 1.5 times the memory of row-wise" in shown
    assert "exposed at 75% overlap" in shown
