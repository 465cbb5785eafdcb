"""Measures training steps on one rank: speed, bytes, memory, stages, data stalls and quality.

A breakdown (RecD, figure 8) assigns every moment of a profiled step to one stage. On CPU, the stage
is that of the innermost operation of the training thread. Work of gloo's threads counts while the
training thread waits for it. On CUDA, the stage is that of the running kernel. Communication counts
only while no computation runs.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from recd_plugins.config.entries import PluginStrategy, by_class, call_class
from recd_plugins.data.stalls import StallMeter, Stalls, StallTotals, Wait
from recd_plugins.interfaces import Section, TableStrategy, TrainedRun
from recd_plugins.interfaces.step_cost import STAGES, Channel, Stage, StageTimes, stage_of
from recd_plugins.interfaces.tasks import Task
from recd_plugins.runtime.machine import clock_of
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.training.evaluation import Predictions

if TYPE_CHECKING:
    from torchrec.distributed.model_parallel import DistributedModelParallel

#: Name of the profiler range around a profiled step.
PROFILED_STEP = "## recd step ##"
# Maximum cost of profiling an operator. Larger differences between steps have other causes.
_EVENT_SECONDS = 3e-6
# Name suffixes of gradient collectives: all-reduce, and reduce between nodes.
_OF_GRADIENTS = ("reduce", "broadcast")
# Stages in order of priority: computation hides communication.
_FOREGROUND: tuple[Stage, ...] = ("lookup", "gemm", "other", "all_to_all", "all_reduce")

# Number of steps in a breakdown. Half are timed and half are profiled.
PROFILED_STEPS = 10
# Number of training predictions that a rank keeps.
_NEWEST_SAMPLES = 5_000_000
# Number of batches that TrainPipelineSparseDist distributes ahead of training.
_READ_AHEAD = 2
# Number of steps by which a device may lag behind the host.
_UNREAD = 64


@dataclass(frozen=True)
class Span:
    """A profiler event with start and end in nanoseconds; ``is_region`` marks a record_function.

    ``operator`` is the correlation id of an operator, or of the operator that launched a kernel.
    """

    name: str
    start: int
    end: int
    thread: int = 0
    is_region: bool = False
    operator: int = 0


@dataclass
class StepEvents:
    """Profiler events of one training step."""

    step: Span
    #: Operators and regions on host threads.
    host: list[Span] = field(default_factory=list)
    #: Collectives on gloo's threads.
    in_flight: list[Span] = field(default_factory=list)
    #: Kernels and copies on the device.
    kernels: list[Span] = field(default_factory=list)
    #: Pairs of time and bytes; bytes are negative for a free.
    allocations: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class StepMemory:
    """Increase of device memory during one step, in bytes: peak and mean over time."""

    peak: float
    mean: float


def read_profile(profiler: profile, device: torch.device) -> StepEvents:
    """Return the events of a profiled step on ``device``."""
    # Kineto's own events (torch 2.11 to 2.14): profile.events() takes seconds a step.
    assert profiler.profiler is not None, "the profile has ended"
    assert profiler.profiler.kineto_results is not None, "the profile has ended"
    events = StepEvents(Span(PROFILED_STEP, 0, 0))
    computes_on = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    found: list[Any] = profiler.profiler.kineto_results.events()
    for event in found:
        name: str = event.name()
        on_device = event.device_type() == DeviceType.CUDA
        if name == "[memory]":
            if event.device_type() == computes_on:
                events.allocations.append((event.start_ns(), event.nbytes()))
            continue
        span = Span(
            name,
            event.start_ns(),
            event.end_ns(),
            event.start_thread_id(),
            event.is_user_annotation(),
            event.linked_correlation_id() if on_device else event.correlation_id(),
        )
        if on_device:
            if not span.is_region:
                events.kernels.append(span)
        elif event.is_async():
            events.in_flight.append(span)
        elif name == PROFILED_STEP:
            events.step = span
        # Calls of the CUDA runtime are linked to the operator that made them.
        elif event.linked_correlation_id() == 0:
            events.host.append(span)
    return events


def host_seconds(events: StepEvents) -> dict[Stage, float]:
    """Return a dict from stage to seconds of the training thread, which sum to the step time."""
    nanoseconds: Counter[Stage] = Counter()
    of_gradients = [s for s in events.in_flight if s.name.endswith(_OF_GRADIENTS)]
    for start, end, stage, in_operator in _segments(events):
        waited = 0
        if stage is None and not in_operator:
            # DistributedDataParallel waits for its collectives outside any operator.
            waited = sum(max(0, min(s.end, end) - max(s.start, start)) for s in of_gradients)
            waited = min(waited, end - start)
            nanoseconds["all_reduce"] += waited
        nanoseconds[stage or "other"] += end - start - waited
    return {stage: nanoseconds[stage] / 1e9 for stage in STAGES}


def device_seconds(events: StepEvents) -> dict[Stage, float]:
    """Return a dict from stage to seconds on the device, which sum to the step time."""
    launched_in: dict[int, Stage | None] = {}
    for thread in {span.thread for span in events.host}:
        for span, around in _stages(span for span in events.host if span.thread == thread):
            launched_in[span.operator] = around
    changes: list[tuple[int, int, Stage]] = []
    for kernel in events.kernels:
        stage: Stage = launched_in.get(kernel.operator) or stage_of(kernel.name) or "other"
        start, end = max(kernel.start, events.step.start), min(kernel.end, events.step.end)
        if start < end:
            changes += [(start, 1, stage), (end, -1, stage)]
    nanoseconds: Counter[Stage] = Counter()
    running: Counter[Stage] = Counter()
    now = events.step.start
    for moment, change, stage in sorted(changes):
        front: Stage = next((each for each in _FOREGROUND if running[each]), "other")
        nanoseconds[front] += moment - now
        running[stage] += change
        now = moment
    nanoseconds["other"] += events.step.end - now
    return {stage: nanoseconds[stage] / 1e9 for stage in STAGES}


def memory_of_step(events: StepEvents) -> StepMemory:
    """Return the increase of device memory during the step."""
    step = events.step
    level = peak = area = 0
    now = step.start
    for moment, num_bytes in sorted(events.allocations, key=lambda a: a[0]):
        if step.start <= moment <= step.end:
            area += level * (moment - now)
            level += num_bytes
            peak = max(peak, level)
            now = moment
    area += level * (step.end - now)
    return StepMemory(peak, area / (step.end - step.start))


def _stages(spans: Iterable[Span]) -> Iterator[tuple[Span, Stage | None]]:
    """Yield (event, stage) of one thread's profiler events, ordered by start time."""
    around: list[tuple[int, Stage | None]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while around and around[-1][0] <= span.start:
            around.pop()
        stage = stage_of(span.name) or (around[-1][1] if around else None)
        around.append((span.end, stage))
        yield span, stage


def _segments(events: StepEvents) -> Iterator[tuple[int, int, Stage | None, bool]]:
    """Yield (start, end, stage, whether in an operator) for each part of a step."""
    step = events.step
    now = step.start
    around: list[tuple[int, Stage | None, bool]] = [(step.end, None, False)]
    thread = (
        s for s in events.host if s.thread == step.thread and step.start <= s.start < step.end
    )
    for span, stage in (*_stages(thread), (Span("", step.end, step.end), None)):
        while around and around[-1][0] <= span.start:
            end, outer, in_operator = around.pop()
            if now < end:
                yield now, end, outer, in_operator
                now = end
        if around:
            _, outer, in_operator = around[-1]
            if now < span.start:
                yield now, span.start, outer, in_operator
                now = span.start
            around.append((min(span.end, around[-1][0]), stage, not span.is_region))


class StepProfile:
    """Measures steps one by one: first warm-up steps, then alternately timed and profiled steps.

    Timed steps give the step time. Profiled steps, minus the cost of profiling, give the share of
    each stage. All ranks measure the same steps.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self._device = device
        self._warmup = warmup
        self._step = 0
        self._timed: list[float] = []
        self._profiled: list[tuple[dict[Stage, float], Counter[Stage], StepMemory]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time or profile one training step, which starts on all ranks after a barrier."""
        self._step += 1
        if self._step <= self._warmup:
            yield
        elif (self._step - self._warmup) % 2:
            self._start_together()
            start = time.perf_counter()
            yield
            self._wait_for_device()
            self._timed.append(time.perf_counter() - start)
        else:
            on_device = self._device.type == "cuda"
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_device]
            with profile(activities=activities, profile_memory=True) as profiler:
                self._start_together()
                with record_function(PROFILED_STEP):
                    yield
                    self._wait_for_device()
            events = read_profile(profiler, self._device)
            seconds = device_seconds(events) if on_device else host_seconds(events)
            thread = (span for span in events.host if span.thread == events.step.thread)
            counts = Counter[Stage](stage or "other" for _, stage in _stages(thread))
            self._profiled.append((seconds, counts, memory_of_step(events)))

    @property
    def complete(self) -> bool:
        """Return True if at least one step was timed and one was profiled."""
        return bool(self._profiled)

    @property
    def step_seconds(self) -> float:
        """Return the median wall time of the timed steps, in seconds."""
        return statistics.median(self._timed)

    def stages(self) -> StageTimes:
        """Return the seconds per stage of a step without profiling overhead."""
        seconds = _medians([seconds for seconds, *_ in self._profiled])
        events = _medians([events for _, events, _ in self._profiled])
        # Profiling costs about the same for every event, so subtract more from stages with many
        # small operations.
        excess = max(0.0, sum(seconds.values()) - self.step_seconds)
        cost = min(_EVENT_SECONDS, excess / max(1.0, sum(events.values())))
        left = {stage: max(0.0, seconds[stage] - cost * events[stage]) for stage in STAGES}
        return StageTimes(**left).scaled(self.step_seconds)

    def memory(self) -> StepMemory:
        """Return the median increase of device memory during a step."""
        found = [memory for *_, memory in self._profiled]
        return StepMemory(
            peak=statistics.median(memory.peak for memory in found),
            mean=statistics.median(memory.mean for memory in found),
        )

    def _start_together(self) -> None:
        self._wait_for_device()
        if dist.is_initialized():
            dist.barrier()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _medians(steps: Sequence[Mapping[Stage, float]]) -> dict[Stage, float]:
    return {stage: statistics.median(step.get(stage, 0) for step in steps) for stage in STAGES}


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
        """Return the data stalls (waits for batches) of timed steps; None without timed steps."""
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
