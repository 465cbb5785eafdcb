"""Breakdown of training steps into stages, and memory of a step, from torch.profiler.

A breakdown (RecD, figure 8) assigns every moment of a profiled step to one stage. On CPU, the stage
is that of the innermost operation of the training thread. Work of gloo's threads counts while the
training thread waits for it. On CUDA, the stage is that of the running kernel. Communication counts
only while no computation runs.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from recd_plugins.interfaces.step_cost import STAGES, Stage, StageTimes, stage_of

if TYPE_CHECKING:
    pass

#: Name of the profiler range around a profiled step.
PROFILED_STEP = "## recd step ##"
# Maximum cost of profiling an operator. Larger differences between steps have other causes.
_EVENT_SECONDS = 3e-6
# Name suffixes of gradient collectives: all-reduce, and reduce between nodes.
_OF_GRADIENTS = ("reduce", "broadcast")
# Stages in order of priority: computation hides communication.
_FOREGROUND: tuple[Stage, ...] = ("lookup", "gemm", "other", "all_to_all", "all_reduce")


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
