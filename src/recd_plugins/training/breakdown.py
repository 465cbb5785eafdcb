"""Time and memory of training steps by stage, from torch.profiler (RecD, figure 8).

Every moment of a step counts once. On CPU it belongs to the innermost operation of the training
thread that has a stage: a copy within an all-to-all is the all-to-all's. Work of gloo's threads
counts while the training thread waits for it. On CUDA a moment belongs to the kernel that runs, and
to one that computes if several do, so that an all-to-all counts only if nothing hides it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.profiler import ProfilerActivity, profile, record_function

from recd_plugins.interfaces.step_cost import STAGES, Stage, StageTimes, stage_of

#: The region around a profiled step.
PROFILED_STEP = "## recd step ##"
_MEMORY = "[memory]"
_CPU = torch.device("cpu")
# Profiling an operator costs no more; steps that differ by more differ by other things.
_EVENT_SECONDS = 3e-6
# Ends of the names of gradients' collectives: all-reduces and, of nodes, reduces.
_OF_GRADIENTS = ("reduce", "broadcast")
# Computation hides communication, in this order.
_FOREGROUND: tuple[Stage, ...] = ("lookup", "gemm", "other", "all_to_all", "all_reduce")


@dataclass(frozen=True)
class Span:
    """An event that ran from ``start`` to ``end``, in nanoseconds.

    Attributes:
        thread: of the host.
        is_region: annotated code, in contrast to an operator.
        operator: number of this operator, or of the one that launched this kernel.
        sequence: number of the autograd node that this operator made, or that runs here, or -1.
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
    """Bytes of one step above those at its start, on the device that computes."""

    peak: float
    mean: float


@dataclass
class StepEvents:
    """Events of one step.

    Attributes:
        step: the region around it.
        host: operators and regions of the host's threads.
        in_flight: collectives that gloo's threads work on.
        kernels: of the device, copies included.
        allocations: moments in nanoseconds with bytes, negative if freed.
    """

    step: Span
    host: list[Span] = field(default_factory=list)
    in_flight: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    allocations: list[tuple[int, int]] = field(default_factory=list)


def read_profile(profiler: profile, device: torch.device) -> StepEvents:
    """Return the events of a profile of one step, on ``device``."""
    # Kineto's own, as profile.events() is made of them (torch 2.11 to 2.14): that one builds a tree
    # of objects, which takes seconds a step.
    assert profiler.profiler is not None, "the profile has ended"
    assert profiler.profiler.kineto_results is not None, "the profile has ended"
    events = StepEvents(Span(PROFILED_STEP, 0, 0))
    computes_on = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    found: list[Any] = profiler.profiler.kineto_results.events()
    for event in found:
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
        # CUDA's runtime is linked to the operator that its time belongs to.
        elif event.linked_correlation_id() == 0:
            events.host.append(span)
    return events


def host_seconds(events: StepEvents) -> dict[Stage, float]:
    """Return seconds of the step's thread by stage; they sum to the step."""
    nanoseconds: Counter[Stage] = Counter()
    of_gradients = [s for s in events.in_flight if s.name.endswith(_OF_GRADIENTS)]
    for start, end, stage, in_operator in _segments(events):
        waited = 0
        if stage is None and not in_operator:
            # DistributedDataParallel waits for its collectives in no operator.
            waited = sum(max(0, min(s.end, end) - max(s.start, start)) for s in of_gradients)
            waited = min(waited, end - start)
            nanoseconds["all_reduce"] += waited
        nanoseconds[stage or "other"] += end - start - waited
    return {stage: nanoseconds[stage] / 1e9 for stage in STAGES}


def events_by_stage(events: StepEvents) -> Counter[Stage]:
    """Return how many spans of the step's thread belong to each stage."""
    thread = [span for span in events.host if span.thread == events.step.thread]
    return Counter(stage or "other" for _, stage in _stages(thread))


def device_seconds(events: StepEvents) -> dict[Stage, float]:
    """Return seconds of the step on the device by stage; they sum to the step."""
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
    """Return what the step allocates above its start."""
    step = events.step
    level = peak = area = 0
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
    """Yield spans of one thread with their stages, in the order in which they start."""
    around: list[tuple[int, Stage | None]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while around and around[-1][0] <= span.start:
            around.pop()
        stage = stage_of(span.name) or (around[-1][1] if around else None)
        around.append((span.end, stage))
        yield span, stage


class _Segment(NamedTuple):
    """Time of the training thread with one stage."""

    start: int
    end: int
    stage: Stage | None
    in_operator: bool


def _segments(events: StepEvents) -> Iterator[_Segment]:
    """Split the time of the step's thread by innermost span."""
    step = events.step
    thread: Sequence[Span] = [
        span
        for span in events.host
        if span.thread == step.thread and step.start <= span.start < step.end
    ]
    now = step.start
    around = [_Segment(step.start, step.end, None, in_operator=False)]

    def until(moment: int) -> Iterator[_Segment]:
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
        around.append(_Segment(span.start, end, stage, in_operator=not span.is_region))
    while around:
        yield from until(around[-1].end)
        around.pop()


class StepProfile:
    """Takes steps one by one: some fill the pipeline, then each second one is profiled.

    A profiled step is slower. The others say how long a step takes; the profiled ones, less the
    cost of profiling, say which share each stage has.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self._device = device
        self._warmup = warmup
        self._step = 0
        self._timed: list[float] = []
        self._profiled: list[tuple[dict[Stage, float], Counter[Stage], StepMemory]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time or profile one training step; all ranks start it together."""
        self._step += 1
        if self._step <= self._warmup:
            yield
        elif (self._step - self._warmup) % 2:
            self._together()
            start = time.perf_counter()
            yield
            self._wait_for_device()
            self._timed.append(time.perf_counter() - start)
        else:
            on_device = self._device.type == "cuda"
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_device]
            with profile(activities=activities, profile_memory=True) as profiler:
                self._together()
                with record_function(PROFILED_STEP):
                    yield
                    self._wait_for_device()
            events = read_profile(profiler, self._device)
            seconds = device_seconds(events) if on_device else host_seconds(events)
            self._profiled.append((seconds, events_by_stage(events), memory_of_step(events)))

    @property
    def complete(self) -> bool:
        """Whether a step was timed and one profiled."""
        return bool(self._profiled)

    @property
    def step_seconds(self) -> float:
        """Median wall time of the steps that were not profiled."""
        return statistics.median(self._timed)

    def stages(self) -> StageTimes:
        """Return seconds of a step that is not profiled, by stage."""
        seconds = _medians([seconds for seconds, *_ in self._profiled])
        events = _medians([events for _, events, _ in self._profiled])
        # Every event costs about the same, so stages of many small operations pay most.
        excess = max(0.0, sum(seconds.values()) - self.step_seconds)
        cost = min(_EVENT_SECONDS, excess / max(1.0, sum(events.values())))
        left = {stage: max(0.0, seconds[stage] - cost * events[stage]) for stage in STAGES}
        return StageTimes(**left).scaled(self.step_seconds)

    def memory(self) -> StepMemory:
        """Return bytes of a step above those at its start."""
        found = [memory for *_, memory in self._profiled]
        return StepMemory(
            peak=statistics.median(memory.peak for memory in found),
            mean=statistics.median(memory.mean for memory in found),
        )

    def _together(self) -> None:
        """Let no rank wait in a step for another that begins it later."""
        self._wait_for_device()
        if dist.is_initialized():
            dist.barrier()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def step_profile(device: torch.device = _CPU, *, warmup: int = 3) -> Iterator[StepProfile]:
    """Profile training steps, with a train pipeline or without. All ranks do it together.

    Example::

        with step_profile(device) as profile:
            for _ in range(13):
                with profile.step():
                    pipeline.progress(batches)
        profile.step_seconds, profile.stages(), profile.memory()

    Args:
        device: that the model is on.
        warmup: steps that only fill the pipeline and the allocators; after them half of the steps
            are timed and half profiled, in turn.
    """
    yield StepProfile(device, warmup)


def static_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return this rank's bytes of parameters, buffers and optimizer state."""
    kept: list[Any] = [*optimizer.state.values()]
    for module in model.modules():
        # Not module.parameters(): sharded modules show slices there, and not all of their state.
        kept += [*module._parameters.values(), *module._buffers.values()]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in map(Tensor.untyped_storage, _local_tensors(kept))
    }
    return sum(storages.values())


def _local_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _local_tensors(each)
    elif isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, Tensor):
        yield value.detach()


def _medians(steps: Sequence[Mapping[Stage, float]]) -> dict[Stage, float]:
    return {stage: statistics.median(step.get(stage, 0) for step in steps) for stage in STAGES}
