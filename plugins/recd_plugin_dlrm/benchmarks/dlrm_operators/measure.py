"""Both programs in one process, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recd_plugin_dlrm.benchmarks.dlrm_operators.configuration import (
    Architecture,
    Configuration,
    random_batches,
)
from recd_plugin_dlrm.benchmarks.dlrm_operators.parts import PARTS, Part, profile_parts
from recd_plugin_dlrm.benchmarks.dlrm_operators.sides import both
from recd_plugins.api.commands import silence_upstream
from recd_plugins.testing.benchmark import keep_freed_memory


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        batches: that go round, made beforehand.
        turns: of each program; one more warms up.
        steps: timed steps of a turn.
        profiled: steps that are profiled, after all turns.
    """

    configuration: Configuration
    architecture: Architecture
    batches: int
    turns: int
    steps: int
    profiled: int
    device: str = "cpu"


@dataclass
class Measured:
    """One program.

    Attributes:
        seconds: wall time of a step, by turn.
        processor_seconds: time of all cores that a step takes, by turn.
        losses: of every step.
        parts: seconds of a step, by profiled step.
    """

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    parts: list[dict[Part, float]] = field(default_factory=list)


def measure(rank: int, world_size: int, job: Job) -> dict[str, Measured]:  # noqa: ARG001
    """``ours`` and ``plain``, which make the same steps. A collective call of one rank."""
    silence_upstream()
    # Or each large tensor is memory that the system clears page by page, above all plain's.
    keep_freed_memory()
    on_cuda = job.device == "cuda"
    device = torch.device(job.device, rank) if on_cuda else torch.device(job.device)
    batches = list(random_batches(job.configuration, job.batches))
    sides = both(job.configuration, job.architecture, batches, device)
    found = {name: Measured() for name in sides}
    losses: dict[str, list[Tensor]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()

    def stepped(name: str, count: int = 1) -> Callable[[], None]:
        def steps() -> None:
            losses[name] += [sides[name].step() for _ in range(count)]
            if on_cuda:
                torch.cuda.synchronize()

        return steps

    order = list(sides)
    for turn in range(job.turns + 1):
        for name in order:
            wall, processor = time.perf_counter(), time.process_time()
            stepped(name, job.steps)()
            if turn:
                found[name].seconds.append((time.perf_counter() - wall) / job.steps)
                found[name].processor_seconds.append((time.process_time() - processor) / job.steps)
        order.reverse()
    for _ in range(job.profiled):
        for name in sides:
            found[name].parts.append(profile_parts(stepped(name), on_cuda))
    for name, result in found.items():
        result.losses = torch.stack(losses[name]).double().tolist()
    return found


def mean_parts(measured: Measured) -> dict[Part, float]:
    """The mean of each part over the profiled steps."""
    return {
        part: sum(step[part] for step in measured.parts) / len(measured.parts) for part in PARTS
    }
