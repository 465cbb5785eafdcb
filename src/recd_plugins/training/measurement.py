"""Measures training steps on one rank: speed, bytes, memory, stages, data stalls and quality."""

from __future__ import annotations

import ctypes
import gc
import resource
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recd_plugins.config.entries import PluginStrategy, by_class, call_class
from recd_plugins.data.stalls import StallMeter, Stalls, StallTotals, Wait
from recd_plugins.interfaces import Section, TableStrategy, TrainedRun
from recd_plugins.interfaces.step_cost import Channel, StageTimes
from recd_plugins.interfaces.tasks import Task
from recd_plugins.runtime.machine import clock_of
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.training.evaluation import Predictions
from recd_plugins.training.step_profile import StepProfile

if TYPE_CHECKING:
    from torchrec.distributed.model_parallel import DistributedModelParallel

# Number of steps in a breakdown. Half are timed and half are profiled.
PROFILED_STEPS = 10
# Number of training predictions that a rank keeps.
_NEWEST_SAMPLES = 5_000_000
# Number of batches that TrainPipelineSparseDist distributes ahead of training.
_READ_AHEAD = 2
# Number of steps by which a device may lag behind the host.
_UNREAD = 64


@dataclass(frozen=True)
class StepCounts:
    """Bytes that one rank sends and ids that it looks up in one step."""

    sent: dict[str, float]
    sent_by_channel: dict[str, float]
    ids: float


class Meter:
    """Counts bytes sent and ids looked up in steps 2 to 5; times later steps."""

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
        self._counts = True
        self._bytes = CollectiveBytes()
        self._ids = 0
        # A run may take days: keep eight bytes per step, and device events only of the newest
        # steps.
        self._seconds = array("d")
        self._spans: deque[tuple[Any, Any, Wait | None]] = deque()
        self._stall_meter = stalls or StallMeter(device)
        self._stalls = StallTotals()

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
            # A pipeline reads no batch while it drains, and several batches while it refills.
            one = self._stall_meter.taken == taken + 1
            wait = self._stall_meter.newest if one else None
            self._spans.append((start, self._clock.mark(), wait))
            self._read_spans(_UNREAD)

    def ran_dry(self) -> None:
        """Discard the counts if the pipeline became empty during the counted steps."""
        if self._step < 1 + self.COUNTED_STEPS + _READ_AHEAD:
            self._counts, self._step = False, 1 + self.COUNTED_STEPS

    def step_seconds(self) -> list[float]:
        """Return the wall time of each timed step in seconds, including reading."""
        self._read_spans(0)
        return self._seconds.tolist()

    def stalls(self) -> Stalls | None:
        """Return the mean data stalls (waits for batches) per timed step; None without steps."""
        self._read_spans(0)
        return self._stalls.mean()

    def _read_spans(self, left: int) -> None:
        # The device may not have finished the newest step yet.
        while len(self._spans) > left:
            start, end, wait = self._spans.popleft()
            seconds = self._clock.seconds(start, end)
            self._seconds.append(seconds)
            if wait is not None:
                self._stalls.add(seconds, wait.by_cause(self._clock), wait.making)

    def per_step(self) -> StepCounts | None:
        """Return the mean bytes sent and ids looked up per step; None if the run was too short."""
        if not self._counts or self._step < 1 + self.COUNTED_STEPS + _READ_AHEAD:
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
    """Measurements of one rank.

    ``observed`` has the results of ``TableStrategy.observe``, keyed by class name.
    """

    counts: StepCounts | None
    peak: int
    observed: dict[str, Any]
    stalls: Stalls | None
    stages: StageTimes | None


class Measurement:
    """Measures the steps of a run on one rank. With ``breakdown``, profiles some of them."""

    def __init__(
        self,
        dmp: DistributedModelParallel,
        parts: Sequence[PluginStrategy],
        device: torch.device,
        first_step: int,
        *,
        breakdown: bool,
        tasks: Sequence[Task] = (),
    ) -> None:
        self._model, self._parts, self._device = dmp.module, parts, device
        self._first_step = first_step
        self.stalls = StallMeter(device)
        self.predictions = Predictions(_NEWEST_SAMPLES, tasks)
        channels = {
            channel: name for part in parts for channel, name in part.channels(dmp.module).items()
        }
        self.meter = Meter(dmp, device, channels, self.stalls)
        self._profile = StepProfile(device, warmup=0)
        first = first_step + 1 + Meter.COUNTED_STEPS
        self._profiled = range(first, first + PROFILED_STEPS if breakdown else first)
        self._peak = 0
        self._observed: dict[str, Any] = {}

    def begin(self) -> None:
        """Start measuring when training begins or continues after a validation."""
        reset_peak(self._device)

    def step(self, done: int) -> AbstractContextManager[None]:
        """Measure a training step in a context; ``done`` is the number of earlier steps."""
        return self._profile.step() if done in self._profiled else self.meter.step()

    def ran_dry(self) -> None:
        """Record that the pipeline became empty, because training stopped for a validation."""
        self.meter.ran_dry()
        self._peak = max(self._peak, peak_bytes(self._device))

    def end(self, step: int) -> None:
        """Stop measuring after the last step, before evaluation begins."""
        self._peak = max(self._peak, peak_bytes(self._device))
        self._observed = {
            _name(cls): call_class(some, "observe", self._model, step - self._first_step)
            for cls, some in by_class(self._parts).items()
        }

    def figures(self) -> RankFigures:
        """Return the measurements of the finished run."""
        return RankFigures(
            self.meter.per_step(),
            self._peak,
            self._observed,
            self.meter.stalls(),
            self._profile.stages() if self._profile.complete else None,
        )


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory that ``peak_bytes`` returns."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)  # else memory used during set-up would count
        with suppress(OSError):  # some containers lack the file
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory since ``reset_peak`` in bytes: CUDA memory, else process memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sum_by_kind(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a dict from key to value, summed over ranks; keys are kinds of collectives."""
    kinds = sorted({kind for rank in per_rank for kind in rank})
    return {kind: sum(rank.get(kind, 0) for rank in per_rank) for kind in kinds}


def sections_of(
    parts: Sequence[PluginStrategy], run: TrainedRun, ranks: Sequence[RankFigures]
) -> dict[str, Section]:
    """Return the report sections of the plugins' table strategies, keyed by section name."""
    return {
        section.name: section
        for cls, some in by_class(parts).items()
        for section in call_class(
            some,
            "sections",
            replace(run, observed=[rank.observed[_name(cls)] for rank in ranks]),
        )
    }


def _name(cls: type[TableStrategy]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
