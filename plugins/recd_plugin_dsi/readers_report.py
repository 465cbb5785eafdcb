"""Plan of the number of readers, from separate measurements of a reader and of the trainer.

First, one reader runs in its own process with one torch thread, and encodes its blocks for sending.
Then all ranks train on prefetched batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Group, RenderableType
from rich.text import Text

from recd_plugins.api import (
    Job,
    RunConfig,
    batch_types,
    build_model,
    devices,
    feeds,
    imports,
    ipc,
    launcher,
    machine,
    prepare,
    prepared_data,
    read_task,
    sharded_models,
    stall_meter,
    text_table,
)

# A reader reads whole blocks until it has enough batches and seconds.
_READ_BATCHES, _READ_SECONDS = 16, 2.0
# Number of prefetched batches, and steps to measure after the pipeline is filled.
_READY, _STEPS, _WARMUP = 8, 32, 4


@dataclass(frozen=True)
class Reading:
    """Measured costs of one reader.

    Attributes:
        making: seconds per batch by stage, including encoding and decoding.
        cpu_seconds: CPU seconds per batch.
        batch_bytes: bytes sent per batch.
    """

    making: batch_types.MakingTimes
    cpu_seconds: float
    batch_bytes: float


@dataclass(frozen=True)
class Training:
    """Measured costs of a training step on prefetched batches, on the slowest rank.

    Attributes:
        seconds: wall time per step.
        cpu_seconds: CPU seconds per step and rank.
        pin_seconds: seconds to pin a batch; 0 without CUDA.
    """

    seconds: float
    cpu_seconds: float
    pin_seconds: float


def study_readers(
    registry: RunConfig,
    plugins_dir: Path | None,
    batch_size: int,
    target: float,
    show: Callable[[str], None],
) -> ReaderPlan:
    """Measure one reader, train on ``training.ranks`` ranks, and plan the number of readers.

    Args:
        registry: the loaded registry file. Its data is prepared here.
        plugins_dir: plugin folder of the registry file.
        batch_size: rows per rank and batch.
        target: fraction of time that the trainer may wait for batches.
        show: called with a progress message at each stage.
    """
    overrides = {"batch_size": batch_size, "checkpoint": {}, "ranks_per_node": None}
    registry = _without_stores(registry.with_training(overrides))
    ranks = registry.training.ranks
    dataset = prepared_data.wrapped_dataset(registry)
    dataset.prepare()
    device = devices.choose_device(registry)
    job = Job(
        registry.path,
        plugins_dir=plugins_dir,
        overrides=overrides,
        device=device,
        text=registry.text,
    )
    show("measuring one reader")
    with torch.device("meta"):
        prepared = prepare(registry, build_model(registry, registry.dataset.schema()))
    work = read_task(registry, 0, ranks, prepared=prepared)
    reader = dataset.reader(rank=0, world_size=ranks, batch_size=batch_size, split="train")
    reading = launcher.launch(_read, 1, work, reader.state_dict(), threads=1)[0]
    show("measuring the trainer on prefetched batches")
    trained = launcher.launch(_train, ranks, job, backend=launcher.backend_for(device))
    training = max(trained, key=lambda rank: rank.seconds)
    return ReaderPlan(reading, training, target, batch_size, ranks, machine.available_cores())


def _read(_rank: int, _world_size: int, work: feeds.ReadTask, position: dict[str, Any]) -> Reading:
    """Measure the reading and encoding of blocks. Decoding does not count as reader time."""
    imports.silence_upstream()
    reader = work.open()
    blocks = _endless(lambda: reader.blocks(position, 0, 1))
    next(blocks)
    making: list[batch_types.MakingTimes] = []
    cpu_seconds, num_bytes, start = 0.0, 0, time.perf_counter()
    while len(making) < _READ_BATCHES or time.perf_counter() - start < _READ_SECONDS:
        begun = time.process_time()
        block = next(blocks)
        packing = time.perf_counter()
        packed = ipc.encode(block)
        cpu_seconds += time.process_time() - begun
        num_bytes += packed.nbytes
        unpacking = time.perf_counter()
        unpacked = ipc.decode(packed)
        moved = unpacked.moved(unpacking - packing, time.perf_counter() - unpacking)
        making += [model_input.making for model_input, _ in moved.batches]
    mean = {
        part.name: fmean(getattr(m, part.name) for m in making)
        for part in fields(batch_types.MakingTimes)
    }
    return Reading(
        batch_types.MakingTimes(**mean), cpu_seconds / len(making), num_bytes / len(making)
    )


def _endless(blocks: Callable[[], Iterator[feeds.BatchBlock]]) -> Iterator[feeds.BatchBlock]:
    """Yield blocks that contain batches, epoch after epoch."""
    while True:
        for block in blocks():
            if isinstance(block.end, Exception):
                raise block.end
            if block.batches:
                yield block


def _train(rank: int, world_size: int, job: Job) -> Training:
    imports.silence_upstream()
    device = devices.device_of_rank(job.device)
    parts = sharded_models.build_sharded_model(_without_stores(job.load()), "plugins", device)
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, device)
    with parts.prepared.dataloader(rank=rank, world_size=world_size, device=device) as loader:
        ready = list(islice(_epochs(loader), _READY))
    batches = cycle(ready)
    clock = machine.clock_of(device)
    parts.dmp.train()
    for _ in range(_WARMUP):
        pipeline.progress(batches)
    dist.barrier()
    begun, marks = time.process_time(), [clock.mark()]
    for _ in range(_STEPS):
        pipeline.progress(batches)
        marks.append(clock.mark())
    steps = [clock.seconds(*pair) for pair in pairwise(marks)]
    cpu_seconds = (time.process_time() - begun) / _STEPS
    return Training(median(steps), cpu_seconds, fmean(batch.making.arrival for batch in ready))


def _without_stores(registry: RunConfig) -> RunConfig:
    """Return the registry without workers, caches and ingestion, so that ranks read directly."""
    return replace(registry.with_training({"workers": 0}), cache=(), ingestion=None)


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@dataclass(frozen=True)
class ReaderPlan:
    """The report of ``recd plan --readers``.

    Attributes:
        reading, training: measured costs.
        target: fraction of time that the trainer may wait for batches.
        batch_size: rows per batch and rank.
        ranks: number of ranks.
        cores: number of cores of this machine.
    """

    reading: Reading
    training: Training
    target: float
    batch_size: int
    ranks: int
    cores: int

    @cached_property
    def pace(self) -> stall_meter.Pace:
        """Return the mean seconds per batch of the reader, the trainer and the transfer."""
        making = self.reading.making
        arrival = making.arrival + self.training.pin_seconds
        return stall_meter.Pace(making.reader, self.training.seconds, arrival)

    @cached_property
    def readers(self) -> int | None:
        """Return the number of readers per rank that meets the target.

        0 means that the trainer can read by itself, None that no number of readers is enough.
        """
        return 0 if self.pace.stall_share(0) <= self.target else self.pace.readers_for(self.target)

    @property
    def trainer_cores(self) -> float:
        """Return the number of cores that the ranks use while they do not wait for batches."""
        return self.ranks * self.training.cpu_seconds / self.training.seconds

    @property
    def reader_cores(self) -> float:
        """Return the number of cores that readers use if they keep up with all ranks."""
        return self.ranks * self.reading.cpu_seconds / self.pace.taking

    @property
    def cores_suffice(self) -> bool:
        """Return whether this machine has enough cores for ranks and readers."""
        return self.trainer_cores + self.reader_cores <= self.cores

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with times in seconds."""
        making, readers = self.reading.making, self.readers
        return {
            "stall_target": self.target,
            "readers_per_rank": readers,
            "readers": None if readers is None else readers * self.ranks,
            "batch_size": self.batch_size,
            "ranks": self.ranks,
            "reader": {
                **{
                    f"{cause}_seconds": getattr(making, cause) for cause in batch_types.STALL_CAUSES
                },
                "batch_seconds": self.pace.making,
                "arrival_seconds": self.pace.arrival,
                "cpu_seconds": self.reading.cpu_seconds,
                "batch_bytes": self.reading.batch_bytes,
            },
            "trainer": asdict(self.training),
            "cores": {
                "machine": self.cores,
                "trainer": self.trainer_cores,
                "readers": self.reader_cores,
                "suffice": self.cores_suffice,
            },
            "advice": self.advice(),
        }

    def advice(self) -> str:
        """Return the recommended number of readers as text."""
        pace, readers = self.pace, self.readers
        if readers == 0:
            return (
                "no reader is needed: with training.workers: 0, ranks wait for data for "
                f"{pace.stall_share(0):.1%} of their time"
            )
        if readers is None:
            return (
                f"no number of readers keeps the waiting time below {self.target:.0%}: for each "
                f"batch the trainer needs {pace.arrival * 1e3:.3g} ms to decode and pin the data, "
                f"and {pace.training * 1e3:.3g} ms for the step"
            )
        waits = f"wait for data for about {pace.stall_share(readers):.1%} of their time"
        if self.cores_suffice:
            return f"set training.workers: {readers}; ranks then {waits}"
        return (
            f"with {readers} readers per rank, ranks would {waits}, but this machine has too few "
            f"cores: readers need {self.reader_cores:.1f} and the trainer needs "
            f"{self.trainer_cores:.1f} of {self.cores}. Read on other machines (ingestion: "
            f"{{use: dsi.ray}}) with {self.reader_cores:.1f} cores for each node. Or make reading "
            "cheaper: store the data clustered, with the list_dict encoding, and preprocessed"
        )


def render(plan: ReaderPlan) -> RenderableType:
    """Return the report for a terminal: costs, waiting time by number of readers, and advice."""
    making, pace = plan.reading.making, plan.pace
    measured = text_table("Time per batch of one rank", [""], ["ms"])
    for name, seconds in {
        **{cause: getattr(making, cause) for cause in batch_types.STALL_CAUSES},
        "one reader": pace.making,
        "decoding, in the trainer": pace.arrival,
        "trainer, on prefetched batches": plan.training.seconds,
    }.items():
        measured.add_row(name, f"{seconds * 1e3:.2f}")
    measured.caption = f"{plan.batch_size:,} rows"
    waiting = text_table(
        f"Waiting time by number of readers (target: at most {plan.target:.0%})",
        ["readers per rank"],
        ["trainer waits"],
    )
    for readers in sorted({0, 1, 2, 4, 8, plan.readers or 0}):
        waiting.add_row(
            f"{'* ' if readers == plan.readers else ''}{readers}",
            f"{pace.stall_share(readers):.1%}",
        )
    return Group(measured, "", waiting, "", Text(plan.advice()))
