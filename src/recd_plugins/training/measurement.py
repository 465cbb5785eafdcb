"""What one rank measures of its training steps: speed, bytes, memory, stages, waits, quality."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recd_plugins.config.entries import CheckedPart, by_class, call_class
from recd_plugins.data.stalls import StallMeter, Stalls, StallTotals, Wait
from recd_plugins.interfaces import Section, TableStrategy, TrainedRun
from recd_plugins.interfaces.step_cost import Channel, StageTimes
from recd_plugins.runtime.machine import clock_of
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.training.assembly import Assembled
from recd_plugins.training.breakdown import StepMemory, StepProfile
from recd_plugins.training.evaluation import Predictions

#: What the ranks of a run have observed, by class of part.
Observed = dict[str, Any]

# Steps of a breakdown: half are timed and half profiled.
PROFILED_STEPS = 10
# Predictions that a rank keeps while it trains.
_NEWEST_SAMPLES = 5_000_000
# Batches that TrainPipelineSparseDist distributes before it trains on them.
_READ_AHEAD = 2
# Steps by which a device may lag behind the host.
_UNREAD = 64
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class StepCounts:
    """What one rank did in one step."""

    sent: dict[str, float]
    sent_by_channel: dict[str, float]
    ids: float


class Meter:
    """Takes steps one by one: the first fills the pipeline, a few are counted, the rest timed.

    Counting slows a step down, so no step is both counted and timed.
    """

    COUNTED_STEPS = 4

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        channels: Mapping[Channel, str] | None = None,
        stalls: StallMeter | None = None,
    ) -> None:
        self._model = model
        self._channels = channels or {}
        self._clock = clock_of(device)
        self._step = 0
        self._cut_short = self._uncounted = False
        self._bytes = CollectiveBytes()
        self._ids = 0
        # A run may have days of steps: eight bytes of each, and marks of the newest.
        self._seconds = array("d")
        self._spans: deque[tuple[Any, Any]] = deque()
        self._stall_meter = stalls or StallMeter(device)
        self._stalls = StallTotals()
        self._waits: deque[tuple[Any, Any, Wait]] = deque()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one training step."""
        self._step += 1
        if self._step == 1:
            yield
        elif self._step <= 1 + self.COUNTED_STEPS:
            with self._bytes, lookup_ids(self._model) as ids:
                yield
            self._ids += ids.total
        else:
            taken, start = self._stall_meter.taken, self._clock.mark()
            yield
            span = start, self._clock.mark()
            self._spans.append(span)
            self._read_spans(_UNREAD)
            # A pipeline that runs dry takes none, and one that fills anew takes several.
            if self._stall_meter.taken == taken + 1 and self._stall_meter.newest is not None:
                self._waits.append((*span, self._stall_meter.newest))
                self._add_waits(_UNREAD)

    def ran_dry(self) -> None:
        """Restart counts that a dry pipeline cut short, once; then time steps without them."""
        if self._uncounted or self._step >= 1 + self.COUNTED_STEPS + _READ_AHEAD:
            return
        self._uncounted, self._cut_short = self._cut_short, True
        self._step = 1 + self.COUNTED_STEPS if self._uncounted else 0
        self._ids, self._bytes = 0, CollectiveBytes()

    def step_seconds(self) -> list[float]:
        """Return the wall time of each timed step, reading included."""
        self._read_spans(0)
        return self._seconds.tolist()

    def stalls(self) -> Stalls | None:
        """Return what the timed steps waited for data; None without any."""
        self._add_waits(0)
        return self._stalls.mean()

    def _read_spans(self, left: int) -> None:
        # The device may not know the time of the newest yet.
        while len(self._spans) > left:
            self._seconds.append(self._clock.seconds(*self._spans.popleft()))

    def _add_waits(self, left: int) -> None:
        while len(self._waits) > left:
            start, end, wait = self._waits.popleft()
            seconds = self._clock.seconds(start, end)
            self._stalls.add(seconds, wait.by_cause(self._clock), wait.making)

    def per_step(self) -> StepCounts | None:
        """Return the mean of the counted steps; None if the run was too short."""
        if self._uncounted or self._step < 1 + self.COUNTED_STEPS + _READ_AHEAD:
            return None
        by_channel = Counter[str]()
        for traffic, num_bytes in self._bytes.sent.items():
            if (name := self._channels.get((traffic.group, traffic.kind))) is not None:
                by_channel[name] += num_bytes
        return StepCounts(
            self._mean(self._bytes.by_kind()),
            self._mean(by_channel),
            self._ids / self.COUNTED_STEPS,
        )

    def _mean(self, totals: Mapping[str, int]) -> dict[str, float]:
        return {name: total / self.COUNTED_STEPS for name, total in totals.items()}


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured."""

    counts: StepCounts | None
    peak: int
    observed: Observed
    stalls: Stalls | None
    stages: StageTimes | None
    memory: StepMemory | None


class Measurement:
    """Measures the steps of a run on one rank.

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
        self._peak = 0
        self._observed: Observed = {}

    def begin(self) -> None:
        """Note that training begins, or goes on after a validation."""
        reset_peak(self._device)

    def step(self, done: int) -> AbstractContextManager[None]:
        """Measure a training step, after so many others of the run."""
        return self._profile.step() if done in self._profiled else self._meter.step()

    def trained(self, logits: Tensor, labels: Tensor) -> None:
        """Keep the predictions of a step, logits and labels ``[B]``."""
        self.predictions.update(logits, labels)

    def waiting(self) -> float | None:
        """Return the share of the newest steps that waited for data, if there are any."""
        recent = self.stalls.recent()
        return None if recent is None else recent.share

    def ran_dry(self) -> None:
        """Note that the pipeline ran dry for a validation."""
        self._meter.ran_dry()
        self._keep_peak()

    def end(self, step: int) -> None:
        """Note that the last step is done, before evaluation begins."""
        self._keep_peak()
        parts = self._parts
        self._observed = observed_by(
            parts.prepared.checked_parts, parts.dmp.module, step - self._first_step
        )

    def figures(self) -> RankFigures:
        """Return the figures of the run, which has ended."""
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
        """Return the wall time of each timed step, reading included."""
        return self._meter.step_seconds()

    def _keep_peak(self) -> None:
        self._peak = max(self._peak, peak_bytes(self._device))


def reset_peak(device: torch.device) -> None:
    """Start to measure peak memory anew; macOS keeps one peak for a whole process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        ctypes.CDLL(None).malloc_trim(0)  # memory of the set-up would count
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak since ``reset_peak``: allocated on a CUDA device, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def sum_by_kind(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Add up what ranks report."""
    kinds = sorted({kind for rank in per_rank for kind in rank})
    return {kind: sum(rank.get(kind, 0) for rank in per_rank) for kind in kinds}


def channels_of(parts: Sequence[CheckedPart], model: nn.Module) -> dict[Channel, str]:
    """Return the names of collectives that table parts want counted apart."""
    return {channel: name for part in parts for channel, name in part.channels(model).items()}


def observed_by(parts: Sequence[CheckedPart], model: nn.Module, steps: int) -> Observed:
    """Return what this rank counted, once for all parts of a class."""
    return {
        _name(cls): call_class(some, "observe", model, steps)
        for cls, some in by_class(parts).items()
    }


def sections_of(
    assembled: Assembled,
    sent: Mapping[str, float] | None,
    ranks: Sequence[Observed],
) -> dict[str, Section]:
    """Return the sections that table parts report, by name.

    Args:
        assembled: the trained model.
        sent: bytes of all ranks in one step by channel; None if nothing was counted.
        ranks: what each has observed.
    """
    if assembled.setting is None:  # a baseline has no parts
        return {}
    found: dict[str, Section] = {}
    for cls, parts in by_class(assembled.prepared.checked_parts).items():
        run = TrainedRun(
            assembled.dmp.module,
            assembled.dmp.plan,
            assembled.tables,
            assembled.setting,
            sent,
            [rank[_name(cls)] for rank in ranks],
        )
        for section in call_class(parts, "sections", run):
            found[section.name] = section
    return found


def _name(cls: type[TableStrategy]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
