"""The base class of trackers: figures of a run, written by rank 0."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from recd_plugins.api import (
    Callback,
    PluginOptions,
    RunEnd,
    RunEvaluation,
    RunInterruption,
    RunStart,
    RunStep,
)

if TYPE_CHECKING:
    from torch import Tensor


def _local(path: object) -> object:
    if "://" in str(path):
        raise ValueError(f"{path} is a URL; it is written to this machine: name a path")
    return path


#: A file or folder of this machine.
LocalPath = Annotated[Path, BeforeValidator(_local)]


class TrackerOptions(PluginOptions):
    """Options of every tracker."""

    every: int = Field(
        default=10,
        gt=0,
        description="Steps of a record of training, whose loss is their mean on rank 0.",
    )


class Tracker(Callback):
    """Writes figures of training every so many steps, and of each evaluation.

    A resumed run appends to the records that its checkpoint had; later ones come again.
    """

    class Options(TrackerOptions):
        pass

    options: TrackerOptions

    @abstractmethod
    def begin(self, start: RunStart, kept: int | None, more: Mapping[str, Any]) -> None:
        """Make ready to write; set ``_records`` to 0 if records begin anew.

        Args:
            start: the run.
            kept: records of the checkpoint that the run resumes; None for a new run.
            more: the ``more_state`` of the checkpoint, and ``last``: figures of the last record.
        """

    @abstractmethod
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures after a step."""

    def flush(self) -> None:
        """Write records to disk before a checkpoint."""

    def close(self, how: str) -> None:
        """End the run: ``completed``, or ``interrupted``."""

    def more_state(self) -> Mapping[str, Any]:
        """Return JSON values that ``begin`` needs to resume."""
        return {}

    def on_start(self, start: RunStart) -> None:
        """Begin, unless the state of a checkpoint follows."""
        self._start, self._writes = start, start.rank == 0
        self._total: Tensor | float = 0.0
        self._last_figures: dict[str, float] = {}
        self._steps = self._records = 0
        self._began = False
        self._since: float | None = None
        if start.step == 0:
            self._begin(None, {})

    def on_step(self, step: RunStep) -> None:
        if not self._writes:
            return
        import torch

        self._total = step.loss.to(torch.float64) + self._total
        self._steps += 1
        if self._since is None:  # the first one compiles, or fills a pipeline
            self._since, self._timed = time.perf_counter(), 0
        else:
            self._timed += 1
        self._rate = step.learning_rate
        if step.step % self.options.every == 0:
            self._write_steps(step.step)

    def on_evaluate(self, evaluation: RunEvaluation) -> None:
        figures = {**asdict(evaluation.quality), **evaluation.metrics}
        of_split = {f"{evaluation.split}_{name}": float(each) for name, each in figures.items()}
        self._write(evaluation.step, of_split)
        if self._since is not None:  # its time is not that of steps
            self._since, self._timed = time.perf_counter(), 0

    def on_interrupt(self, interruption: RunInterruption) -> None:  # noqa: ARG002
        self._close("interrupted")

    def on_end(self, end: RunEnd) -> None:
        if self._steps:
            self._write_steps(end.step)
        self._close("completed")

    def state_dict(self) -> dict[str, Any]:
        """Return records and pending steps of rank 0."""
        if not self._writes:
            return {}
        self._begin_late()
        self.flush()
        return {
            "records": self._records,
            "steps": self._steps,
            "total": float(self._total),
            "rate": self._rate,
            "last": self._last_figures,
            **self.more_state(),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        if not self._writes or not states[0]:
            return
        state = dict(states[0])
        self._records = state.pop("records")
        self._steps, self._total = state.pop("steps"), state.pop("total")
        self._last_figures, self._rate = state.get("last", {}), state.pop("rate", None)
        self._begin(self._records, state)

    def _write_steps(self, step: int) -> None:
        figures = {"loss": float(self._total) / self._steps}
        if self._rate is not None:
            figures["learning_rate"] = self._rate
        now = time.perf_counter()
        if self._start.step_samples and self._since is not None and self._timed:
            each = (now - self._since) / self._timed
            figures["samples_per_second"] = self._start.step_samples / each
        self._write(step, figures)
        self._total, self._steps = 0.0, 0
        self._since, self._timed = now, 0

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writes:
            self._begin_late()
            self._records += 1
            known = {"step": float(step), **figures}
            self._last_figures = {
                name: value
                for name, value in known.items()
                if math.isfinite(value) and name != "samples_per_second"
            }
            self.write(step, figures)

    def _close(self, how: str) -> None:
        if self._writes:
            self._begin_late()
            self.close(how)

    def _begin_late(self) -> None:
        """Begin a run whose checkpoint has no state of this tracker."""
        if not self._began:
            self._begin(None, {})

    def _begin(self, kept: int | None, more: Mapping[str, Any]) -> None:
        self._began = True
        if self._writes:
            self.begin(self._start, kept, more)

    _rate: float | None = None
