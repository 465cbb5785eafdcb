"""What is measured of a run while it trains."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from recd_plugins.data.stalls import StallMeter, Stalls
from recd_plugins.training.assembly import Assembled
from recd_plugins.training.breakdown import StepMemory, StepProfile
from recd_plugins.training.drift import Drift, Prediction
from recd_plugins.training.memory import peak_bytes, reset_peak
from recd_plugins.training.meter import Meter, StepCounts
from recd_plugins.training.quality import Predictions
from recd_plugins.training.table_parts import Observed, channels_of, observed_by
from recd_plugins.values.stages import StageTimes

# Steps of a breakdown: half are timed and half profiled.
PROFILED_STEPS = 10

# Whose predictions a rank keeps while it trains, however long that takes.
_NEWEST_SAMPLES = 5_000_000


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured of the steps of a run.

    Attributes:
        counts: of a step; None for a run too short to tell.
        peak: bytes of memory while it trained.
        observed: by table parts.
        stalls: what timed steps waited for data; None where none was timed.
        stages: seconds of a step by stage; None where steps were not profiled.
        memory: of a step, likewise.
    """

    counts: StepCounts | None
    peak: int
    observed: Observed
    stalls: Stalls | None
    stages: StageTimes | None
    memory: StepMemory | None


class Measurement:
    """Speed, bytes, stages, memory, waits and quality of the steps of a run on one rank.

    Args:
        parts: what is trained.
        device: of this rank.
        first_step: done before.
        breakdown: profile some steps.

    Attributes:
        stalls: of the batches that the steps take.
        predictions: of batches before the step that they were made in trained on them.
    """

    def __init__(
        self, parts: Assembled, device: torch.device, first_step: int, *, breakdown: bool
    ) -> None:
        self._parts, self._device, self._first_step = parts, device, first_step
        self.stalls = StallMeter(device)
        self.predictions = Predictions(window=_NEWEST_SAMPLES)
        channels = channels_of(parts.prepared.checked_parts, parts.dmp.module)
        self._meter = Meter(parts.dmp, device, channels, self.stalls)
        self._profile = StepProfile(device, warmup=0)
        first = first_step + 1 + Meter.COUNTED_STEPS
        self._profiled = range(first, first + PROFILED_STEPS if breakdown else first)
        predicted = parts.predicted
        self._drift = None if predicted is None else Drift(predicted.stages, self._profile)
        self._peak = 0
        self._observed: Observed = {}

    def begin(self) -> None:
        """Training begins, or goes on after a validation."""
        reset_peak(self._device)

    def step(self, done: int) -> AbstractContextManager[None]:
        """Surrounds a training step, after so many others of the run."""
        return self._profile.step() if done in self._profiled else self._meter.step()

    def trained(self, logits: Tensor, labels: Tensor) -> None:
        """What a step predicted, logits and labels ``[B]``."""
        self.predictions.update(logits, labels)
        if self._drift is not None:
            self._drift.look(self._meter)

    def waiting(self) -> float | None:
        """The share of the newest steps that waited for data; None before there is any."""
        recent = self.stalls.recent()
        return None if recent is None else recent.share

    def ran_dry(self) -> None:
        """Batches are let run out for a validation."""
        self._meter.ran_dry()
        self._keep_peak()

    def end(self, step: int) -> None:
        """The last step is done; evaluation, which would be counted too, has not begun."""
        self._keep_peak()
        parts = self._parts
        self._observed = observed_by(
            parts.prepared.checked_parts, parts.dmp.module, step - self._first_step
        )

    def figures(self) -> RankFigures:
        """What came of it, once it has ended."""
        profiled = self._profile.complete
        return RankFigures(
            self._meter.per_step(),
            self._peak,
            self._observed,
            self._meter.stalls(),
            self._profile.stages() if profiled else None,
            self._profile.memory() if profiled else None,
        )

    def step_seconds(self) -> list[float]:
        """Wall time of each timed step, reading included."""
        return self._meter.step_seconds()

    def prediction(self, stages: StageTimes | None) -> Prediction | None:
        """Of a step, next to what was timed; None where no costs were measured."""
        return None if self._drift is None else self._drift.of(self._meter, stages)

    def _keep_peak(self) -> None:
        self._peak = max(self._peak, peak_bytes(self._device))
