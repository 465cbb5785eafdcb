"""What a comparison says of two runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from recd_plugins.data.stalls import Stalls
from recd_plugins.interfaces.batch import STALL_CAUSES, MakingTimes
from recd_plugins.interfaces.callback import Quality
from recd_plugins.interfaces.step_cost import STAGES, StageTimes
from recd_plugins.runtime.files import write_json
from recd_plugins.training.result import (
    Comparison,
    Result,
    StallReport,
    figures,
    worse_than_base_rate,
)


def result(losses: list[float], samples_per_second: float = 100.0) -> Result:
    return Result(
        samples_per_second=samples_per_second,
        step_seconds=0.5,
        collective_bytes={"all_to_all": 1000.0, "all_reduce": 500.0},
        ids_looked_up=10.0,
        peak_memory_bytes=10**9,
        losses=losses,
        train=Quality(0.9, 0.7, 64),
        test=None,
    )


def compared(*rounds: tuple[Result, Result]) -> Comparison:
    return Comparison([dict(zip(("baseline", "plugins"), pair, strict=True)) for pair in rounds])


def test_figures() -> None:
    stages = StageTimes(0.1, 0.2, 0.05, 0.01, 0.14)
    profiled = replace(result([0.5, 0.25]), stages=stages)
    own = list(figures(profiled))
    at = own.index("step_seconds") + 1
    assert own[at : at + 5] == [f"{stage}_seconds" for stage in STAGES]
    comparison = compared((profiled, result([0.5, 0.75], 400.0)))
    assert comparison.loss_max_abs_diff("plugins") == 0.5
    report = json.loads(json.dumps(comparison.as_json()))
    assert sum(report["baseline"]["stages"].values()) == stages.total == 0.5
    assert report["ratios"]["samples_per_second"] == 4.0
    assert report["ratios"]["collective_bytes"] == 1.0
    assert report["baseline"]["losses"] == [0.5, 0.25]


def test_advice_depends_on_the_training_rows() -> None:
    advice = {None: "If recd run shows a value below 1", 0.9: "The model overfits", 1.1: "Train"}
    for train, said in advice.items():
        assert f"every row. {said}" in worse_than_base_rate(1.2, "test", train=train)


def test_nan_is_not_agreement(tmp_path: Path) -> None:
    comparison = compared((result([0.5, 0.4]), result([0.5, math.nan])))
    assert math.isnan(comparison.loss_max_abs_diff("plugins"))
    write_json(tmp_path / "report.json", comparison.as_json())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["loss_max_abs_diff"] is None


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([0.5, 0.4, 0.3], "The losses of all 3 steps are equal."),
        ([0.5, 0.4, 0.3 + 5e-7], "The losses of all 3 steps agree within 5.0e-07."),
        (
            [0.5, 0.4 + 2e-6, 0.3 + 4e-6],
            "The losses of 3 steps first differ by more than 1e-06 at step 2, and by at most "
            "4.0e-06. Training amplifies rounding.",
        ),
        ([0.5, 0.4, math.nan], "at step 3, and by at most nan. Training amplifies rounding, or"),
    ],
)
def test_the_first_step_with_other_losses_is_named(losses: list[float], text: str) -> None:
    equal = (result([0.5, 0.4, 0.3]), result([0.5, 0.4, 0.3]))
    comparison = compared(equal, (result([0.5, 0.4, 0.3]), result(losses)))
    assert text in comparison.losses_text("plugins")
    assert text in str(comparison.table().caption)


def test_rounds_show_medians_and_spread() -> None:
    speeds = [(100.0, 90.0), (100.0, 130.0), (120.0, 150.0)]
    first, *others = [(result([0.5], a), result([0.5], b)) for a, b in speeds]
    comparison = compared(first, *others)
    report = json.loads(json.dumps(comparison.as_json()))
    assert report["ratios"]["samples_per_second"] == 1.25
    rounds = {variant: found["samples_per_second"] for variant, found in report["rounds"].items()}
    assert rounds == {
        "baseline": {
            "value": {"median": 100.0, "least": 100.0, "most": 120.0},
            "ratio": {"median": 1.0, "least": 1.0, "most": 1.0},
        },
        "plugins": {
            "value": {"median": 130.0, "least": 90.0, "most": 150.0},
            "ratio": {"median": 1.25, "least": 0.9, "most": 1.3},
        },
    }
    table = comparison.table()
    names, _, values = (list(column.cells) for column in table.columns)
    cells = dict(zip(names, values, strict=True))
    shown = "130\n90 to 150\n1.25x\n0.9x to 1.3x\nno difference shown"
    assert cells["samples per second"] == shown
    assert cells["step time (median)"] == "500.0 ms"
    assert "rounds" not in compared(first).as_json()


def test_the_first_is_the_yardstick() -> None:
    results = {
        "a.x": result([0.5, 0.25]),
        "b.y": replace(
            result([0.5, 0.75]), collective_bytes={"all_reduce": 500.0, "all_to_all": 0.0}
        ),
    }
    compared = Comparison([results], shardings=True)
    assert compared.loss_max_abs_diff("b.y") == 0.5
    report = compared.as_json()
    assert report["ratios"]["a.x"]["all_to_all_bytes"] == 1
    assert report["ratios"]["b.y"]["all_to_all_bytes"] == 0
    assert report["loss_max_abs_diff"] == {"a.x": 0, "b.y": 0.5}
    other_way = Comparison([{name: results[name] for name in ("b.y", "a.x")}])
    assert other_way.ratios("a.x")["all_to_all_bytes"] is None


def stalls(*waited: float, making: float = 0.0) -> Stalls:
    seconds = dict(zip(STALL_CAUSES, waited, strict=True))
    return Stalls(10, 1.0 + sum(waited), seconds, MakingTimes(fill=making))


def report(*ranks: Stalls) -> StallReport:
    found = StallReport.of(ranks)
    assert found is not None
    return found


def test_mean_and_worst_rank() -> None:
    found = report(stalls(0.0, 0.0, 1.0, 0.0), stalls(2.0, 0.0, 1.0, 0.0))
    assert found.mean_shares() == {
        "fill": pytest.approx(0.25),
        "convert": 0.0,
        "preprocess": pytest.approx((1 / 2 + 1 / 4) / 2),
        "transfer": 0.0,
    }
    assert found.as_json()["share"] == pytest.approx((0.5 + 0.75) / 2)
    assert (found.worst_rank, found.worst.share) == (1, 0.75)
    assert found.as_json()["worst"]["shares"]["fill"] == 0.5
    assert StallReport.of([stalls(0.0, 0.0, 0.0, 0.0), None]) is None


def test_workers_that_would_do() -> None:
    found = report(stalls(0.5, 0.5, 2.0, 0.0, making=3.0))
    assert found.readers == 3
    assert found.as_json()["readers_needed"] == 3
    advice = found.advice()
    assert "75% of a step" in advice
    assert "preprocess" in advice
    assert "training.workers: 3" in advice


def test_little_waiting_needs_no_advice() -> None:
    assert report(stalls(0.2, 0.1, 0.3, 0.0)).advice()
    assert not report(stalls(0.1, 0.0, 0.1, 0.0)).advice()
