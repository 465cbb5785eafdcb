"""Steps that take longer than was predicted, or shorter."""

from __future__ import annotations

from typing import Any

import pytest

from recd_plugins.training.drift import Drift, Prediction
from recd_plugins.values.stages import STAGES, StageTimes

PREDICTED = StageTimes(lookup=0.01, gemm=0.02, all_to_all=0.05, all_reduce=0.01, other=0.01)


class Profile:
    complete = True

    def stages(self) -> StageTimes:
        return StageTimes(lookup=0.01, gemm=0.02, all_to_all=0.15, all_reduce=0.01, other=0.02)


class Meter:
    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    @property
    def timed_steps(self) -> int:
        return len(self.seconds)

    def step_seconds(self) -> list[float]:
        return self.seconds

    def stalls(self) -> None:
        return None


def test_it_is_said_once_and_names_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    profile: Any = Profile()
    drift = Drift(PREDICTED, profile)
    for steps in (19, 20, 40):
        meter: Any = Meter(*[0.21] * steps)
        drift.look(meter)
        shown = capsys.readouterr().err
        assert bool(shown) == (steps == 20)
        if shown:
            assert "takes 210.0 ms and was predicted to take 100.0, off by 2.1x, most in" in shown
            assert "all-to-all: 150.0 ms and 50.0" in shown


def test_what_is_near_is_no_drift(capsys: pytest.CaptureFixture[str]) -> None:
    profile: Any = Profile()
    meter: Any = Meter(*[0.14] * 20)
    drift = Drift(PREDICTED, profile)
    drift.look(meter)
    assert not capsys.readouterr().err
    found = drift.of(meter, None)
    assert found is not None
    report = found.as_json()
    assert report["factor"] == pytest.approx(1.4)
    assert report["most_off"] is None
    assert set(report["stages"]) == set(STAGES)
    assert "off by" not in str(found)
    nothing: Any = Meter()
    assert drift.of(nothing, None) is None


def test_faster_is_off_too() -> None:
    found = Prediction(PREDICTED, 0.05, None)
    assert found.off
    assert "off by 2.0x: --breakdown shows in which stage" in str(found)


def test_few_steps_are_no_drift() -> None:
    profile: Any = Profile()
    meter: Any = Meter(0.3, 0.5)
    found = Drift(PREDICTED, profile).of(meter, None)
    assert str(found) == (
        "a step takes 400.0 ms and was predicted to take 100.0; 2 timed are too few to judge by, "
        "take 20 or more"
    )
    assert found is not None
    assert found.as_json()["timed_steps"] == 2


def test_what_waits_for_data_is_told_apart() -> None:
    assert "takes 210.0 ms, of which 30.0 wait for data, and was predicted" in str(
        Prediction(PREDICTED, 0.21, None, 0.03)
    )
    for measured, waiting in ((0.21, 0.01), (0.14, 0.03), (0.05, 0.03)):
        found = Prediction(PREDICTED, measured, None, waiting)
        assert "wait" not in str(found)
        assert found.as_json()["waiting_seconds"] == waiting
