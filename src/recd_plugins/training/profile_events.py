"""Seconds by stage and bytes over time, from the events of one profiled step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile

from recd_plugins.values.stages import STAGES, Stage, stage_of

#: The region around a profiled step.
PROFILED_STEP = "## recd step ##"
_MEMORY = "[memory]"
#: How names of gradients' collectives end: those of all-reduces and, of nodes, reduces.
_OF_GRADIENTS = ("reduce", "broadcast")
# What computes hides what communicates, in this order.
_FOREGROUND: tuple[Stage, ...] = ("lookup", "gemm", "other", "all_to_all", "all_reduce")


@dataclass(frozen=True)
class Span:
    """Something that ran from ``start`` to ``end``, in nanoseconds.

    Attributes:
        thread: of the host.
        is_region: annotated code, in contrast to an operator.
        operator: number of this operator, or of the one that launched this kernel.
        sequence: number of the autograd node that this operator made, or that runs here; -1 of
            none.
    """

    name: str
    start: int
    end: int
    thread: int = 0
    is_region: bool = False
    operator: int = 0
    sequence: int = -1


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step above those at its start, on the device that computes.

    Attributes:
        peak: the most at any time.
        mean: over the step's time.
    """

    peak: float
    mean: float


@dataclass
class StepEvents:
    """What the profiler saw of one step.

    Attributes:
        step: the region around it.
        host: operators and regions of the host's threads.
        in_flight: collectives that gloo's threads work on.
        kernels: of the device, copies included.
        allocations: moments in nanoseconds with bytes, negative where they are freed.
    """

    step: Span
    host: list[Span] = field(default_factory=list)
    in_flight: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    allocations: list[tuple[int, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many events profiling cost time for."""
        return len(self.host) + len(self.allocations)


def read_profile(profiler: profile, device: torch.device) -> StepEvents:
    """The events of a profile that holds one step, on ``device``."""
    events = StepEvents(Span(PROFILED_STEP, 0, 0))
    computes_on = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    for event in _events(profiler):
        name: str = event.name()
        on_device = event.device_type() == DeviceType.CUDA
        if name == _MEMORY:
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
            event.sequence_nr(),
        )
        if on_device:
            if not span.is_region:
                events.kernels.append(span)
        elif event.is_async():
            events.in_flight.append(span)
        elif name == PROFILED_STEP:
            events.step = span
        # What is linked to an operator is CUDA's runtime, whose time is that operator's.
        elif event.linked_correlation_id() == 0:
            events.host.append(span)
    return events


def _events(profiler: profile) -> list[Any]:
    # Kineto's own, as torch.profiler.profile.events() is made of them (torch 2.11 to 2.14): that
    # one builds a tree of objects, which takes seconds a step.
    assert profiler.profiler is not None, "the profile has ended"
    assert profiler.profiler.kineto_results is not None, "the profile has ended"
    return profiler.profiler.kineto_results.events()


def host_seconds(events: StepEvents) -> dict[Stage, float]:
    """Seconds of the step on its thread by stage; they sum to the step.

    A moment belongs to the innermost span, or else to the closest around it, that has a stage.
    """
    nanoseconds: Counter[Stage] = Counter()
    of_gradients = [s for s in events.in_flight if s.name.endswith(_OF_GRADIENTS)]
    for start, end, stage, in_operator in _stretches(events):
        waited = 0
        if stage is None and not in_operator:
            # DistributedDataParallel waits for its collectives in no operator.
            waited = sum(max(0, min(s.end, end) - max(s.start, start)) for s in of_gradients)
            waited = min(waited, end - start)
            nanoseconds["all_reduce"] += waited
        nanoseconds[stage or "other"] += end - start - waited
    return {stage: nanoseconds[stage] / 1e9 for stage in STAGES}


def events_by_stage(events: StepEvents) -> Counter[Stage]:
    """How many spans of the step's thread belong to each stage, bytes allocated in them too."""
    thread = [span for span in events.host if span.thread == events.step.thread]
    return Counter(stage or "other" for _, stage in _stages(thread))


def device_seconds(events: StepEvents) -> dict[Stage, float]:
    """Seconds of the step on the device by stage; they sum to the step.

    A moment belongs to the kernel that runs, and to ``other`` while none does; where several run,
    to one that computes before one that communicates.
    """
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
    """What the step allocates above its start."""
    step = events.step
    level = peak = 0
    area = 0
    now = step.start
    for moment, num_bytes in sorted(events.allocations, key=lambda a: a[0]):
        if not step.start <= moment <= step.end:
            continue
        area += level * (moment - now)
        level += num_bytes
        peak = max(peak, level)
        now = moment
    area += level * (step.end - now)
    return StepMemory(peak, area / (step.end - step.start))


def _stages(spans: Iterable[Span]) -> Iterator[tuple[Span, Stage | None]]:
    """Spans of one thread with their stages, in the order in which they start."""
    around: list[tuple[int, Stage | None]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while around and around[-1][0] <= span.start:
            around.pop()
        stage = stage_of(span.name) or (around[-1][1] if around else None)
        around.append((span.end, stage))
        yield span, stage


class _Stretch(NamedTuple):
    """Time of the training thread with one stage."""

    start: int
    end: int
    stage: Stage | None
    in_operator: bool


def _stretches(events: StepEvents) -> Iterator[_Stretch]:
    """The step's thread from its start to its end."""
    step = events.step
    thread: Sequence[Span] = [
        span
        for span in events.host
        if span.thread == step.thread and step.start <= span.start < step.end
    ]
    now = step.start
    around = [_Stretch(step.start, step.end, None, in_operator=False)]

    def until(moment: int) -> Iterator[_Stretch]:
        nonlocal now
        if now < moment:
            yield around[-1]._replace(start=now, end=moment)
            now = moment

    for span, stage in _stages(thread):
        while around[-1].end <= span.start:
            yield from until(around[-1].end)
            around.pop()
        yield from until(span.start)
        end = min(span.end, around[-1].end)
        around.append(_Stretch(span.start, end, stage, in_operator=not span.is_region))
    while around:
        yield from until(around[-1].end)
        around.pop()
