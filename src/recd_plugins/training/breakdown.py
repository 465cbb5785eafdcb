"""Where the time and the memory of training steps go, from torch.profiler (RecD, figure 8).

Every moment of a step counts once. On CPU it belongs to the innermost operation of the training
thread that has a stage: a copy within an all-to-all is the all-to-all's. What gloo's threads do
meanwhile counts where the training thread waits for it. On CUDA a moment belongs to the kernel
that runs, to one that computes where several do, so that an all-to-all counts where nothing hides
it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.profiler import ProfilerActivity, profile, record_function

from recd_plugins.training.profile_events import (
    PROFILED_STEP,
    StepMemory,
    device_seconds,
    events_by_stage,
    host_seconds,
    memory_of_step,
    read_profile,
)
from recd_plugins.values.stages import STAGES, Stage, StageTimes

__all__ = ["StepMemory", "StepProfile", "static_bytes", "step_profile"]

_CPU = torch.device("cpu")
# Profiling an operator costs no more; where steps differ by more they differ by other things.
_EVENT_SECONDS = 3e-6


@dataclass(frozen=True)
class _Step:
    """One profiled step: seconds and events by stage, and its memory."""

    seconds: Mapping[Stage, float]
    events: Mapping[Stage, int]
    memory: StepMemory


class StepProfile:
    """Takes steps one by one: some fill the pipeline, then each second one is profiled.

    A profiled step is slower. The others say how long a step takes; a profiled one says which part
    of it each stage has, less what profiling its events cost.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self._device = device
        self._warmup = warmup
        self._step = 0
        self._timed: list[float] = []
        self._profiled: list[_Step] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds one training step; all ranks start it together."""
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
            with self._profiler() as profiler:
                self._together()
                with record_function(PROFILED_STEP):
                    yield
                    self._wait_for_device()
            self._profiled.append(self._read(profiler))

    @property
    def complete(self) -> bool:
        """Whether there were steps enough: one that was timed and one that was profiled."""
        return bool(self._profiled)

    @property
    def step_seconds(self) -> float:
        """Median wall time of the steps that were not profiled.

        Raises:
            ValueError: there were too few steps.
        """
        self._check()
        return statistics.median(self._timed)

    def stages(self) -> StageTimes:
        """Seconds of a step that is not profiled, by stage.

        Raises:
            ValueError: there were too few steps.
        """
        self._check()
        seconds = _medians([step.seconds for step in self._profiled])
        events = _medians([step.events for step in self._profiled])
        # Every event costs about the same, so that stages of many small operations pay most.
        excess = max(0.0, sum(seconds.values()) - self.step_seconds)
        cost = min(_EVENT_SECONDS, excess / max(1.0, sum(events.values())))
        left = {stage: max(0.0, seconds[stage] - cost * events[stage]) for stage in STAGES}
        return StageTimes(**left).scaled(self.step_seconds)

    def memory(self) -> StepMemory:
        """Bytes of a step above those at its start.

        Raises:
            ValueError: there were too few steps.
        """
        self._check()
        return StepMemory(
            peak=statistics.median(step.memory.peak for step in self._profiled),
            mean=statistics.median(step.memory.mean for step in self._profiled),
        )

    def _check(self) -> None:
        if not self.complete:
            raise ValueError(
                f"{self._step} steps are too few to profile: {self._warmup} fill the pipeline, "
                "then one is timed and one profiled, and so on"
            )

    def _profiler(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities, profile_memory=True)

    def _read(self, profiler: profile) -> _Step:
        events = read_profile(profiler, self._device)
        on_device = self._device.type == "cuda"
        seconds = device_seconds(events) if on_device else host_seconds(events)
        return _Step(seconds, events_by_stage(events), memory_of_step(events))

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
    """Bytes of this rank that stay from step to step: parameters, buffers and optimizer state."""
    kept: list[Any] = [value for state in optimizer.state.values() for value in _values(state)]
    for module in model.modules():
        # Not module.parameters(): sharded modules show slices there, and not all of their state.
        kept += [*module._parameters.values(), *module._buffers.values()]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for value in kept
        for storage in map(Tensor.untyped_storage, _local_tensors(value))
    }
    return sum(storages.values())


def _values(state: Any) -> Iterator[Any]:
    """What an optimizer keeps for one parameter, in nested dictionaries."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _values(value)
    else:
        yield state


def _local_tensors(value: Any) -> list[Tensor]:
    """The tensors of this rank; none of what is no tensor."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.detach()] if isinstance(value, Tensor) else []


def _medians(steps: Sequence[Mapping[Stage, float]]) -> dict[Stage, float]:
    return {stage: statistics.median(step.get(stage, 0) for step in steps) for stage in STAGES}
