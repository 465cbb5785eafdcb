"""The report of `recd plan --tiers`, of FlexShard's RM-2 and small tables."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from recd_plugin_flexshard.plan_report import (
    EntryTiers,
    TiersReport,
    plot,
    render,
    study_entry,
)
from recd_plugin_flexshard.planning import ClusterShape, CostOptions, TableDemand, paper, plan_tiers
from recd_plugin_flexshard.planning.plan import POINTS, Strategy
from recd_plugin_flexshard.table_plan import collectives_of
from recd_plugins.errors import RecdError
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
    assert list(one["points"]) == list(POINTS)
    assert one["options"]["memory_multiplier"] == 6
    for points in one["curves"].values():
        assert all(point["memory_bytes"] > 0 for point in points)


def test_the_curve_of_two_tiers_goes_from_row_wise_over_the_points_to_all(rm_2: EntryTiers) -> None:
    curve = rm_2.curves["two_tier"]
    hot = [sum(t.hot for t in plan.tables) for plan in curve]
    assert hot == sorted(hot)
    assert curve[0].memory_bytes == pytest.approx(rm_2.plan.row_wise_memory_bytes)
    assert curve[0].a2a_reduction == 0
    assert hot[-1] == 30_000_000
    assert {sum(t.hot for t in point.tables) for point in rm_2.points.values()} <= set(hot)
    least = min(plan.memory_bytes for plan in curve)
    assert least == rm_2.points["least_memory"].memory_bytes
    # Three tiers send less than two at any budget that both have.
    neutral = rm_2.points["memory_neutral"]
    fitting = [
        plan for plan in rm_2.curves["three_tier"] if plan.memory_bytes <= neutral.memory_bytes
    ]
    assert max(plan.a2a_reduction for plan in fitting) > neutral.a2a_reduction


def test_one_node_has_no_three_tiers() -> None:
    found = entry("two_tier", replace(SMALL, nodes=1))
    assert list(found.alternatives) == ["two_tier", "joint"]
    assert list(found.curves) == ["two_tier"]
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


def test_the_plot(tmp_path: Path, rm_2: EntryTiers) -> None:
    plot(report(rm_2, entry("joint")), tmp_path / "new" / "tiers.png")
    assert (tmp_path / "new" / "tiers.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RecdError, match=r"tiers.doc: cannot be written"):
        plot(report(rm_2), tmp_path / "tiers.doc")
