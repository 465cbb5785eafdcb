"""Steps as they were predicted, and as they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from recd_plugins.data.stalls import STALL_TARGET
from recd_plugins.training.breakdown import StepProfile
from recd_plugins.training.meter import Meter
from recd_plugins.values.stages import STAGES, Stage, StageTimes

#: By what factor a step may be off before that is said.
MOST_OFF = 1.5
# Timed steps until it is looked at.
_STEPS = 20


@dataclass(frozen=True)
class Prediction:
    """A step as the measured costs of the topology have it, next to those that were timed.

    Attributes:
        predicted: by stage.
        measured_seconds: of a step, the median.
        stages: as they were profiled, where they were.
        waiting_seconds: of a step, for data.
        timed_steps: that the median is of.
    """

    predicted: StageTimes
    measured_seconds: float
    stages: StageTimes | None
    waiting_seconds: float = 0.0
    timed_steps: int = _STEPS

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured_seconds / self.predicted.total

    @property
    def off(self) -> bool:
        """Whether they are further apart than ``MOST_OFF``."""
        return not 1 / MOST_OFF <= self.factor <= MOST_OFF

    @property
    def most_off(self) -> Stage | None:
        """The stage that differs most; None where stages were not profiled."""
        if self.stages is None:
            return None
        measured, predicted = self.stages.as_dict(), self.predicted.as_dict()
        return max(STAGES, key=lambda stage: abs(measured[stage] - predicted[stage]))

    def as_json(self) -> Mapping[str, Any]:
        """JSON values."""
        return {
            "seconds": self.predicted.total,
            "stages": self.predicted.as_dict(),
            "measured_seconds": self.measured_seconds,
            "waiting_seconds": self.waiting_seconds,
            "timed_steps": self.timed_steps,
            "factor": self.factor,
            "most_off": self.most_off,
        }

    def __str__(self) -> str:
        waiting = ""
        if self.factor > MOST_OFF and self.waiting_seconds > STALL_TARGET * self.measured_seconds:
            waiting = f", of which {self.waiting_seconds * 1e3:,.1f} wait for data,"
        line = (
            f"a step takes {self.measured_seconds * 1e3:,.1f} ms{waiting} and was predicted to "
            f"take {self.predicted.total * 1e3:,.1f}"
        )
        if not self.off:
            return line
        if self.timed_steps < _STEPS:
            return (
                f"{line}; {self.timed_steps} timed are too few to judge by, take {_STEPS} or more"
            )
        line += f", off by {max(self.factor, 1 / self.factor):.1f}x"
        if self.most_off is None or self.stages is None:
            where = ": --breakdown shows in which stage"
        else:
            stage = self.most_off
            where = (
                f", most in {stage.replace('_', '-')}: {getattr(self.stages, stage) * 1e3:,.1f} ms "
                f"and {getattr(self.predicted, stage) * 1e3:,.1f}"
            )
        return f"{line}{where}; recd calibrate measures the cluster as it is now"


class Drift:
    """Compares steps of a run with what was predicted, and says once where they are apart.

    Args:
        predicted: a step.
        profile: of steps, where some are profiled.
    """

    def __init__(self, predicted: StageTimes, profile: StepProfile) -> None:
        self._predicted, self._profile = predicted, profile
        self._looked = False

    def look(self, meter: Meter) -> None:
        """After a step: enough of them were timed, or not yet."""
        if self._looked or meter.timed_steps < _STEPS:
            return
        self._looked = True
        stages = self._profile.stages() if self._profile.complete else None
        found = self.of(meter, stages)
        if found is not None and found.off:
            click.echo(str(found), err=True)

    def of(self, meter: Meter, stages: StageTimes | None) -> Prediction | None:
        """What came of it; None where no step was timed."""
        seconds = meter.step_seconds()
        if not seconds:
            return None
        waits = meter.stalls()
        waiting = 0.0 if waits is None else sum(waits.seconds.values())
        median = statistics.median(seconds)
        return Prediction(self._predicted, median, stages, waiting, len(seconds))
