"""The benchmark of hot batches trains on every order, and holds changes against seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.benchmarks.tiny import tiny

from recd_plugin_scars.benchmarks import hot_batches
from recd_plugin_scars.benchmarks.hot_batches import Source, Trained
from recd_plugins.interfaces.callback import Quality
from recd_plugins.testing.benchmark import Figure
from recd_plugins.training.group_report import GroupCount, GroupReport


def test_it_trains_on_every_order(tmp_path: Path) -> None:
    found = tiny("hot_batches")
    figures = {
        figure["figure"].removeprefix("papercal_"): figure["value"] for figure in found["figures"]
    }
    assert 0.9 < figures["ne_plain"] < 1.1
    assert figures["ne_hot_minus_plain"] != 0
    assert figures["ne_spread_of_seeds"] > 0
    assert figures["ne_abs_change_over_noise"] == abs(figures["ne_change_over_noise"])
    assert figures["hot_samples"] >= hot_batches.HOT_SAMPLES
    assert figures["mixed_batches"] <= 1 / 32, "a window of 32 batches"
    (path,) = hot_batches.plot(found, tmp_path)
    assert path.read_text().startswith("<?xml")


def figures_of(*seeds: tuple[float, float, float]) -> dict[str, Figure]:
    """Of seeds with these NEs in the plain order, after hot batches and in a random order."""
    counted = GroupCount()
    counted.add({"hot": 3})
    counted.add({"hot": 1, "normal": 2})
    report = GroupReport.of([counted], {})
    assert report is not None
    groups = {group.name: group for group in report.groups}

    def trained(ne: float) -> Trained:
        return Trained(Quality(ne, 0.5, 9), groups)

    orders = [(trained(plain), trained(hot), trained(random)) for plain, hot, random in seeds]
    figures = hot_batches.figures(Source("some", "", "", 0.5, 0.4, 0.1), orders)
    return {figure.figure.removeprefix("some_"): figure for figure in figures}


def test_the_change_is_held_against_seeds_of_one_order() -> None:
    figures = figures_of((0.90, 0.93, 0.96), (0.92, 0.93, 0.99))
    assert figures["ne_random_minus_plain"].value == pytest.approx(0.065)
    assert figures["ne_spread_of_seeds"].value == pytest.approx(0.02)
    assert figures["ne_spread_of_random_orders"].value == pytest.approx(0.03)
    assert figures["ne_change_over_noise"].value == pytest.approx(0.02 / 0.03)
    assert figures["hot_samples"].value == pytest.approx(4 / 6)
    assert figures["mixed_batches"].value == 0.5


@pytest.mark.parametrize("change", [0.05, -0.05])
def test_a_large_change_misses_the_goal_in_either_direction(change: float) -> None:
    figures = figures_of((0.90, 0.90 + change, 0.90), (0.92, 0.92 + change, 0.92))
    assert figures["ne_change_over_noise"].value == pytest.approx(change / 0.02)
    size = figures["ne_abs_change_over_noise"]
    assert (size.value, size.goal) == (pytest.approx(2.5), 1.0)
