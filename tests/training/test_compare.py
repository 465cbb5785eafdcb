"""What a comparison says of two runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from recd_plugins.data.stalls import Stalls
from recd_plugins.files import write_json
from recd_plugins.interfaces.callback import Quality
from recd_plugins.training.breakdown import StepMemory
from recd_plugins.training.checkpoint_files import ValidationCurve
from recd_plugins.training.compare import Comparison, figures, in_rounds
from recd_plugins.training.data_report import StallReport
from recd_plugins.training.result import (
    Result,
    quality_advice,
    worse_than_base_rate,
)
from recd_plugins.training.validation import ValidationReport
from recd_plugins.values.batch import STALL_CAUSES, MakingTimes
from recd_plugins.values.stages import STAGES, StageTimes


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
    first, *again = [dict(zip(("baseline", "plugins"), pair, strict=True)) for pair in rounds]
    return Comparison(first, again)


def test_figures() -> None:
    comparison = compared((result([0.5, 0.25]), result([0.5, 0.75], 400.0)))
    assert comparison.loss_max_abs_diff("plugins") == 0.5
    report = comparison.as_json()
    assert report["ratios"]["samples_per_second"] == 4.0
    assert report["ratios"]["collective_bytes"] == 1.0
    assert report["baseline"]["losses"] == [0.5, 0.25]


def test_what_a_format_of_the_wire_rounds_is_named() -> None:
    sides = {"baseline": result([0.5, 0.25]), "plugins": result([0.5, 0.2])}
    caption = Comparison(sides, wire="int8").table().caption
    assert caption == (
        "losses of 2 steps are up to 5.0e-02 apart: training.wire int8 rounds what the "
        "plugins' side sends, and the baseline sends fp32"
    )


def test_rounding_that_grew_is_told_from_losses_that_were_never_alike() -> None:
    before = [0.5, 0.25, 0.75]
    grown = compared((result(before), result([0.5, 0.25 + 2**-24, 0.7])))
    assert grown.table().caption == (
        "losses of 3 steps are up to 5.0e-02 apart, those of the first 2 within 1e-06: training "
        "amplifies rounding, or something computes otherwise"
    )
    for after, words in (
        (before, "losses of 3 steps agree within 0.0e+00"),
        ([0.5, 0.25 + 2**-24, 0.7505], "steps agree within 5.0e-04, of the first 2 within 1e-06"),
        ([0.6, 0.25, 0.75], "up to 1.0e-01 apart, from the first on, which is more than rounding"),
    ):
        assert words in str(compared((result(before), result(after))).table().caption)
    twice = compared((result(before), result(before)), (result(before), result([0.5, 0, 0])))
    assert twice.steps_alike("plugins") == 1


def test_a_ratio_of_a_few_steps_is_not_to_be_believed() -> None:
    def timed(steps: int) -> Result:
        waits = Stalls(steps, 0.1, dict.fromkeys(STALL_CAUSES, 0.02), MakingTimes(), 0.0, 0.0)
        return replace(result([0.5]), stalls=StallReport((waits,), workers=0))

    assert "; speed is of 1 timed" in str(compared((timed(9), timed(1))).table().caption)
    assert "timed" not in str(compared((timed(9), timed(5))).table().caption)
    for steps, advises in ((4, False), (5, True)):
        stalls = timed(steps).stalls
        assert stalls is not None
        assert bool(stalls.advice()) == advises


def test_a_run_that_was_resumed_says_what_its_figures_are_of() -> None:
    assert result([0.5, 0.25]).table().caption is None
    caption = replace(result([0.5] * 9), first_step=6).table().caption
    assert caption == "resumed at step 6: train figures and speed are of the 3 steps since"


def test_stages_stand_under_the_step() -> None:
    stages = StageTimes(0.1, 0.2, 0.05, 0.01, 0.14)
    profiled = replace(result([0.5]), stages=stages, step_memory=StepMemory(4096.0, 2048.0))
    comparison = compared((profiled, replace(profiled, stages=stages.scaled(0.25))))
    names = list(figures(profiled))
    assert names[2:7] == [f"{stage}_seconds" for stage in STAGES]
    report = json.loads(json.dumps(comparison.as_json()))
    assert sum(report["baseline"]["stages"].values()) == stages.total == 0.5
    assert report["ratios"]["all_to_all_seconds"] == 0.5
    assert report["plugins"]["step_memory"] == {"peak": 4096.0, "mean": 2048.0}
    assert not {"gemm_seconds", "step_peak_bytes"} & figures(result([0.5])).keys()


def test_what_one_side_has_alone_stands_where_it_has_it() -> None:
    more = replace(result([0.5]), collective_bytes={"all_gather": 20.0, "all_reduce": 500.0})
    names = [*compared((result([0.5]), more)).units]
    kinds = ["all_gather_bytes", "all_to_all_bytes", "all_reduce_bytes"]
    assert names[2:6] == [*kinds, "collective_bytes"]


def test_nan_is_not_agreement(tmp_path: Path) -> None:
    comparison = compared((result([0.5, 0.4]), result([0.5, math.nan])))
    assert math.isnan(comparison.loss_max_abs_diff("plugins"))
    write_json(tmp_path / "report.json", comparison.as_json())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["loss_max_abs_diff"] is None


def test_rounds_show_medians_and_spread() -> None:
    speeds = [(100.0, 90.0), (100.0, 130.0), (120.0, 150.0)]
    first, *others = [(result([0.5], a), result([0.5], b)) for a, b in speeds]
    comparison = compared(first, *others)
    report = json.loads(json.dumps(comparison.as_json()))
    assert report["ratios"]["samples_per_second"] == 1.25
    rounds = {side: found["samples_per_second"] for side, found in report["rounds"].items()}
    assert rounds == {
        "baseline": {"value": {"median": 100.0, "least": 100.0, "most": 120.0}, "ratio": None},
        "plugins": {
            "value": {"median": 130.0, "least": 90.0, "most": 150.0},
            "ratio": {"median": 1.25, "least": 0.9, "most": 1.3},
        },
    }
    table = comparison.table()
    ratios = list(table.columns[3].cells)
    assert ratios[0] == "1.25x\n0.9x to 1.3x\nno difference shown"
    assert ratios[1] == "1x"
    assert next(iter(table.columns[2].cells)) == "130\n90 to 150"
    assert "rounds" not in compared(first).as_json()


def test_sides_take_turns() -> None:
    turns: list[str] = []

    def train(side: str) -> int:
        turns.append(side)
        return len(turns)

    assert in_rounds(["a", "b"], 3, train) == [{"a": 1, "b": 2}, {"a": 4, "b": 3}, {"a": 5, "b": 6}]
    assert "".join(turns) == "abbaab"


def test_worse_than_the_base_rate_is_said() -> None:
    assert worse_than_base_rate(0.99, "test") == ""
    said = worse_than_base_rate(1.01, "test", "plugins")
    assert said.startswith("The normalized entropy of plugins on the test split, 1.01000, is above")
    assert "Train longer" in worse_than_base_rate(1.01, "test", train=1.02)
    fits = worse_than_base_rate(1.01, "test", train=0.7)
    assert "Training rows are predicted better (0.70000): the model overfits: use more" in fits
    assert "Train longer" not in fits
    assert "If training rows are predicted better, the model overfits" in said
    one_label = worse_than_base_rate(math.nan, "train")
    assert one_label.startswith("All labels of the train split are the same")


@pytest.mark.parametrize(
    ("values", "train", "told"),
    [
        ([0.8, 0.9, 0.95], 0.7, True),
        ([0.9, 0.8, 0.85], 0.7, False),
        ([0.8, 0.9, 0.95], 0.85, False),
        ([0.9, 0.85, 0.8], 0.7, False),
        ([None, None, None], 0.7, False),
    ],
)
def test_overfitting_is_said(values: list[float | None], train: float, told: bool) -> None:
    curve = ValidationCurve("log_loss", "min", [2, 4, 6], values)
    of_run = {
        "validation": ValidationReport(curve, False).as_json(),
        "train": {"normalized_entropy": train},
        "test": {"normalized_entropy": 0.8, "auc": 0.9},
    }
    said = quality_advice(of_run, "ours")
    assert bool(said) == told
    assert not told or said == [
        "Overfitting: log_loss of ours on the test split was best at step 2; training rows are "
        "predicted better (normalized entropy 0.70000 against 0.80000). Use more data, fewer "
        "epochs or regularisation."
    ]
    assert not quality_advice(of_run | {"validation": None})


def test_an_auc_that_is_hardly_ever_real_is_said() -> None:
    def advice(auc: float) -> list[str]:
        values = {"train": None, "test": {"normalized_entropy": 0.5, "auc": auc}}
        return quality_advice(values, "plugins")

    assert [advice(auc) for auc in (0.5, 0.99, math.nan)] == [[], [], []]
    assert advice(0.9987)[0].startswith(
        "The test AUC of plugins, 0.9987, is suspiciously high: is a feature known"
    )
