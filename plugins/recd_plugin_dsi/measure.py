"""Costs of one reader and of the trainer alone on this machine.

The reader runs in a process of its own with one thread of torch, as the trainer's workers do, and
packs its blocks for the wire. The trainer then trains, on all ranks, on batches that lie ready.
Each takes several rounds, of which medians count: other load of the machine slows some of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice, pairwise
from statistics import fmean, median, pstdev
from typing import Any

import torch
import torch.distributed as dist

from recd_plugins.api import (
    BatchBlock,
    Job,
    MakingTimes,
    ReadTask,
    RunConfig,
    assemble,
    backend_for,
    build_model,
    clock_of,
    decode,
    device_of_rank,
    encode,
    launch,
    peak_bytes,
    prepare,
    read_task,
    silence_upstream,
    wrapped_dataset,
)

_ROUNDS = 5
# Of a round: whole blocks, until there are so many batches and so many seconds.
_READ_BATCHES, _READ_SECONDS = 8, 0.5
# Batches that lie ready, and steps of a round, after those that fill the pipeline.
_READY, _STEPS, _WARMUP = 8, 8, 4

_PARTS = tuple(field.name for field in fields(MakingTimes))


@dataclass(frozen=True)
class Reading:
    """One reader.

    Attributes:
        making: seconds of a batch by part, packing for the wire and unpacking with it.
        deviation: standard deviation of the seconds that the reader is busy with a batch.
        cpu_seconds: of processors, a batch.
        batch_bytes: of a batch on the wire.
        memory_bytes: of the reader's process at its peak, the libraries that it imports with it.
    """

    making: MakingTimes
    deviation: float
    cpu_seconds: float
    batch_bytes: float
    memory_bytes: int


@dataclass(frozen=True)
class Training:
    """The trainer on batches that lie ready, the slowest rank.

    Attributes:
        seconds: of a step.
        deviation: their standard deviation.
        cpu_seconds: of processors, a step of one rank.
        pin_seconds: that pinning a batch took; 0 without CUDA.
    """

    seconds: float
    deviation: float
    cpu_seconds: float
    pin_seconds: float


def measure(
    registry: RunConfig, job: Job, show: Callable[[str], None] = lambda _: None
) -> tuple[Reading, Training, float]:
    """Read with one reader, and train on ``training.ranks`` ranks. Also: batches of a block.

    Args:
        registry: its data is prepared; caches and checkpoints are left out.
        job: of its ranks.
        show: told what comes next.

    Raises:
        RecdError: reading or training does not go.
    """
    ranks = registry.training.ranks
    show("reading with one reader")
    with torch.device("meta"):
        prepared = prepare(registry, build_model(registry, registry.dataset.schema()))
    work = read_task(registry, 0, ranks, prepared=prepared)
    reader = wrapped_dataset(registry).reader(
        rank=0, world_size=ranks, batch_size=registry.training.batch_size, split="train"
    )
    blocks = reader.num_blocks()
    reading = launch(_read, 1, work, reader.state_dict(), threads=1)[0]
    show("training on batches that lie ready")
    trained = launch(_train, ranks, job, backend=backend_for(job.device))
    slowest = max(trained, key=lambda rank: rank.seconds)
    block = len(reader) / blocks if blocks else 1.0
    return reading, slowest, block


def _read(_rank: int, _world_size: int, work: ReadTask, position: dict[str, Any]) -> Reading:
    silence_upstream()
    reader = work.open()
    blocks = _endless(lambda: reader.blocks(position, 0, 1))
    _round(blocks, batches=1, seconds=0.0)
    rounds = [_round(blocks, _READ_BATCHES, _READ_SECONDS) for _ in range(_ROUNDS)]
    means = [_mean(each.making) for each in rounds]
    return Reading(
        MakingTimes(**{name: median(getattr(each, name) for each in means) for name in _PARTS}),
        median(pstdev(made.reader for made in each.making) for each in rounds),
        median(each.cpu_seconds / len(each.making) for each in rounds),
        sum(each.bytes for each in rounds) / sum(len(each.making) for each in rounds),
        peak_bytes(torch.device("cpu")),
    )


@dataclass
class _Round:
    making: list[MakingTimes]
    cpu_seconds: float = 0.0
    bytes: int = 0


def _round(blocks: Iterator[BatchBlock], batches: int, seconds: float) -> _Round:
    """Read and pack some blocks, and unpack them again, which is no work of a reader."""
    found = _Round([])
    start = time.perf_counter()
    while len(found.making) < batches or time.perf_counter() - start < seconds:
        begun = time.process_time()
        block = next(blocks)
        packed, packing = _timed(encode, block)
        found.cpu_seconds += time.process_time() - begun
        found.bytes += packed.nbytes
        unpacked, unpacking = _timed(decode, packed)
        moved = unpacked.moved(packing, unpacking)
        found.making += [model_input.making for model_input, _ in moved.batches]
    return found


def _endless(blocks: Callable[[], Iterator[BatchBlock]]) -> Iterator[BatchBlock]:
    """Blocks with batches, epoch after epoch."""
    while True:
        for block in blocks():
            if isinstance(block.end, Exception):
                raise block.end
            if block.batches:
                yield block


def _timed(function: Callable[[Any], Any], value: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function(value)
    return result, time.perf_counter() - start


def _mean(makings: Sequence[MakingTimes]) -> MakingTimes:
    return MakingTimes(**{name: fmean(getattr(each, name) for each in makings) for name in _PARTS})


def _train(rank: int, world_size: int, job: Job) -> Training:
    silence_upstream()
    device = device_of_rank(job.device)
    registry = without_stores(job.load())
    parts = assemble(registry, "plugins", device)
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
    with parts.prepared.dataloader(rank=rank, world_size=world_size, device=device) as loader:
        ready = list(islice(_epochs(loader), _READY))
    batches = cycle(ready)
    clock = clock_of(device)
    parts.dmp.train()
    for _ in range(_WARMUP):
        pipeline.progress(batches)
    steps, cpu = [], []
    for _ in range(_ROUNDS):
        dist.barrier()
        begun = time.process_time()
        marks = [clock.mark()]
        for _ in range(_STEPS):
            pipeline.progress(batches)
            marks.append(clock.mark())
        steps.append([clock.seconds(*pair) for pair in pairwise(marks)])
        cpu.append((time.process_time() - begun) / _STEPS)
    return Training(
        median(fmean(each) for each in steps),
        median(pstdev(each) for each in steps),
        median(cpu),
        fmean(batch.making.arrival for batch in ready),
    )


def without_stores(registry: RunConfig) -> RunConfig:
    """The registry read by the ranks themselves, without caches, whose files belong to its runs."""
    return replace(registry.with_training({"workers": 0}), cache=(), ingestion=None)


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
