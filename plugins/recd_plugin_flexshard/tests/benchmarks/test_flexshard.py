"""``recd bench flexshard``: the paper's tables, and the parts that train, on a few rows."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

import numpy as np
import pytest
from click.testing import CliRunner
from tests.benchmarks.tiny import measured, tiny

from recd_plugin_flexshard.benchmarks import paper_tables
from recd_plugin_flexshard.benchmarks.flexshard import PARTS, plot
from recd_plugin_flexshard.benchmarks.one_table_figures import (
    SHARDERS,
    STOCK,
    OneTable,
)
from recd_plugin_flexshard.benchmarks.one_table_plans import (
    PROFILED,
    THREE_TIER,
    TWO_TIER,
    make_plans,
)
from recd_plugin_flexshard.benchmarks.paper_tables import neutrality
from recd_plugin_flexshard.benchmarks.papercal import JOINT, SIDES
from recd_plugin_flexshard.benchmarks.papercal import STOCK as STOCK_ROW_WISE
from recd_plugin_flexshard.benchmarks.papercal_figures import Papercal
from recd_plugin_flexshard.benchmarks.popularity import Popularity, scaled
from recd_plugin_flexshard.benchmarks.sizes import SIZES
from recd_plugin_flexshard.planning import paper
from recd_plugins.cli import main
from recd_plugins.testing.benchmark import Findings

SCALED = SIZES["tiny"].rm2


@pytest.fixture(scope="module")
def one_table() -> OneTable:
    return cast(OneTable, measured("flexshard", "measure_one_table"))


@pytest.fixture(scope="module")
def papercal() -> Papercal:
    return cast(Papercal, measured("flexshard", "measure_papercal"))


def test_the_papers_rows_are_memory_neutral_and_ours_are_next_to_them() -> None:
    assert max(neutrality().values()) < 0.01
    found = tiny("flexshard")  # in which these tables are those of any size
    figures = [each for each in found["figures"] if each["figure"].startswith("table_5")]
    assert len(figures) == 2
    assert all(each["value"] < each["goal"] for each in figures)
    table_5, table_6, joint = found["details"][:3]
    rm2 = dict(zip(table_5["headings"], table_5["rows"][3], strict=True))
    assert rm2[""] == "RM-2: ours"
    assert (rm2["2-tier DP"], rm2["3-tier DP"]) == ("507,072", "128,736")
    assert rm2["a2a 3-"] == "85.7%"
    assert len(table_6["rows"]) == 3 * len(paper.MODELS)
    assert joint["rows"][2] == [
        *("dedup 4x + tiers, M=6; least time", "91.3%", "94.2%", "88.5%", "93.1%")
    ]


def test_a_scaled_table_has_the_shares_of_the_large_one() -> None:
    probabilities = scaled(paper.MODELS["RM-2"].fitted(), SCALED.scale)
    assert probabilities.sum() == pytest.approx(paper.MODELS["RM-2"].length, rel=1e-3)
    plans = make_plans(SCALED, SCALED.popularity())
    large = paper.MODELS["RM-2"]
    (three,) = plans.by_side[THREE_TIER].tables
    assert three.hot_share == pytest.approx(large.hot_covered, abs=0.005)
    assert three.hot_share + three.flex_share == pytest.approx(0.857, abs=0.005)
    assert plans.by_side[TWO_TIER].a2a_reduction == pytest.approx(0.77, abs=0.005)


def test_batches_follow_the_popularity() -> None:
    popularity = Popularity.shuffled(np.array([3.0, 1.0, 0.5, 0.5]), seed=1)
    counts = np.bincount(popularity.draw(np.random.default_rng(0), 10_000), minlength=4)
    assert counts[popularity.rows] / 10_000 == pytest.approx([3, 1, 0.5, 0.5], abs=0.05)
    batch = popularity.batch(np.random.default_rng(0), 100)
    kjt = batch.sequence_features
    assert kjt is not None
    assert kjt.stride() == len(batch.labels) == 100
    assert int(kjt.lengths().sum()) == len(kjt.values())
    moved = Popularity.shuffled(np.ones(1000), seed=1).swapped(0.2, seed=0)
    stays = (moved.rows == Popularity.shuffled(np.ones(1000), seed=1).rows).mean()
    assert sorted(moved.rows) == list(range(1000))
    assert stays == pytest.approx(0.8, abs=0.04)


def test_tiers_save_what_is_predicted_and_train_the_same(one_table: OneTable) -> None:
    figures = {figure.figure: figure.value for figure in one_table.figures()}
    assert figures["rm2_a2a_reduction"] == pytest.approx(0.857, abs=0.01)
    assert figures["rm2_a2a_reduction_2_tier"] == pytest.approx(0.77, abs=0.015)
    assert figures["prediction_error_known_popularity"] < 0.01
    assert figures["prediction_error_tier_bytes"] < 0.06
    assert figures["rm2_a2a_reduction_planned_for_4x2"] < figures["rm2_a2a_reduction"]
    # A profile of few samples promises more than it keeps.
    assert one_table.predicted(PROFILED) > one_table.measured(PROFILED)
    assert one_table.measured(SHARDERS) == 0
    assert 0 < one_table.loss_max_abs_diff < 1e-6


def test_rows_by_popularity_are_uneven(one_table: OneTable) -> None:
    rows = {str(row[0]): row[1:] for row in one_table.imbalance_table().rows}
    observed, expected, by_popularity = map(float, rows[STOCK])
    assert observed == pytest.approx(expected, rel=0.05)
    assert by_popularity > 3 * float(rows[THREE_TIER][1])


def test_a_plot_is_drawn_from_the_report(one_table: OneTable, tmp_path) -> None:
    found = Findings(one_table.figures(), one_table.details(), one_table.notes())
    (path,) = plot(asdict(found), tmp_path / "new")
    assert "3-tier: flex_gradients" in path.read_text()


def test_deduplication_and_tiers_add_up(papercal: Papercal) -> None:
    assert set(papercal.trained) == set(SIDES)
    alone = max(papercal.reduction("joint"), papercal.reduction("row-wise, deduplicated"))
    assert papercal.reduction(JOINT) > alone > 0.3
    assert papercal.trained[JOINT].ids < papercal.trained[STOCK_ROW_WISE].ids / 2
    assert papercal.trained[JOINT].flex > 0
    assert 0 < papercal.loss_max_abs_diff < 1e-6
    assert [row[0] for row in papercal.details()[0].rows] == list(SIDES)


def test_tiers_that_follow_regain_what_those_that_stay_lose() -> None:
    drift = measured("flexshard", "measure_drift")
    assert drift.stay[1] > drift.stay[0] + 0.05
    assert drift.follow[0] == pytest.approx(drift.stay[0], abs=0.06)
    assert drift.regained > 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "rm9"], f"--only rm9: the parts are {', '.join(PARTS)}"),
        (
            ["--only", "tables", "--plot", "plots"],
            "--plot draws bytes by tier, which --only rm2 measures: leave --only out",
        ),
    ],
)
def test_what_it_cannot_do_is_said(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("details", "figures"):  # seconds, and another test's matter
        monkeypatch.setattr(paper_tables, part, list)
    result = CliRunner().invoke(main, ["bench", "flexshard", *arguments])
    assert result.exit_code == 1
    assert result.stderr.endswith(message + "\n")
