"""Computes the number of readers from separate measurements of a reader and of the trainer.

First, one reader with one torch thread reads batches and encodes them for sending. Then all ranks
train on batches that are already in memory.
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
        making: seconds per batch in each stage, including encoding and decoding.
        cpu_seconds: CPU seconds per batch.
        batch_bytes: encoded size of a batch in bytes.
    """

    making: batch_types.MakingTimes
    cpu_seconds: float
    batch_bytes: float


@dataclass(frozen=True)
class Training:
    """Measured costs of a training step on batches in memory, on the slowest rank.

    Attributes:
        seconds: wall time per step.
        cpu_seconds: CPU seconds per step and rank.
        pin_seconds: seconds to pin the memory of a batch; 0 without CUDA.
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
    """Measure one reader and then the training step, and return the planned number of readers.

    Args:
        registry: the parsed registry file of the run. Its dataset is prepared here.
        plugins_dir: folder of plugin files that the registry file needs.
        batch_size: rows per rank and batch.
        target: fraction of time that the trainer may wait for batches, 0 to 1.
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
    """Measure the seconds, CPU seconds and bytes of reading and encoding batches."""
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
    """Yield the non-empty blocks of all epochs, without end. Raises errors of the reader."""
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
    """Return the run without workers, caches and ingestion, so that ranks read the data."""
    return replace(registry.with_training({"workers": 0}), cache=(), ingestion=None)


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@dataclass(frozen=True)
class ReaderPlan:
    """The measurements of ``recd plan --readers``, and the number of readers computed from them.

    Attributes:
        reading, training: measured costs.
        target: fraction of time that the trainer may wait for batches, 0 to 1.
        batch_size: rows per batch and rank.
        ranks: number of ranks.
        cores: number of CPU cores of this machine.
    """

    reading: Reading
    training: Training
    target: float
    batch_size: int
    ranks: int
    cores: int

    @cached_property
    def pace(self) -> stall_meter.Pace:
        """Return the mean seconds per batch of reading, training and transfer."""
        making = self.reading.making
        arrival = making.arrival + self.training.pin_seconds
        return stall_meter.Pace(making.reader, self.training.seconds, arrival)

    @cached_property
    def readers(self) -> int | None:
        """Return the number of readers per rank with which the trainer waits at most ``target``.

        Returns 0 if the trainer can read without readers, and None if no number is enough.
        """
        return 0 if self.pace.stall_share(0) <= self.target else self.pace.readers_for(self.target)

    @property
    def trainer_cores(self) -> float:
        """Return the number of cores that training uses on all ranks."""
        return self.ranks * self.training.cpu_seconds / self.training.seconds

    @property
    def reader_cores(self) -> float:
        """Return the number of cores that the readers of all ranks use."""
        return self.ranks * self.reading.cpu_seconds / self.pace.taking

    @property
    def cores_suffice(self) -> bool:
        """Return whether this machine has enough cores for ranks and readers."""
        return self.trainer_cores + self.reader_cores <= self.cores

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Times are in seconds."""
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
        """Return a text that recommends a number of readers."""
        pace, readers = self.pace, self.readers
        if readers == 0:
            return (
                "no readers are needed. With training.workers: 0, ranks wait for data "
                f"{pace.stall_share(0):.1%} of the time"
            )
        if readers is None:
            return (
                f"no number of readers keeps the waiting time below {self.target:.0%}. For each "
                f"batch, the trainer decodes and pins data for {pace.arrival * 1e3:.3g} ms, and "
                f"trains for {pace.training * 1e3:.3g} ms"
            )
        waits = f"wait for data about {pace.stall_share(readers):.1%} of the time"
        if self.cores_suffice:
            return f"set training.workers: {readers}. Ranks then {waits}"
        return (
            f"with {readers} readers per rank, ranks would {waits}, but this machine has only "
            f"{self.cores} cores. Readers need {self.reader_cores:.1f} cores, and the trainer "
            f"{self.trainer_cores:.1f}. Read on other machines (ingestion: {{use: dsi.ray}}) with "
            f"{self.reader_cores:.1f} cores per node. Or store the data clustered, in the layout "
            "list_dict, and preprocessed, which makes reading faster"
        )


def render(plan: ReaderPlan) -> RenderableType:
    """Return the report as rich tables for the terminal, followed by the advice."""
    making, pace = plan.reading.making, plan.pace
    measured = text_table("Time per batch of one rank", ["stage"], ["ms"])
    for name, seconds in {
        **{cause: getattr(making, cause) for cause in batch_types.STALL_CAUSES},
        "one reader, all stages": pace.making,
        "decoding, in the trainer": pace.arrival,
        "trainer, on prefetched batches": plan.training.seconds,
    }.items():
        measured.add_row(name, f"{seconds * 1e3:.2f}")
    measured.caption = f"{plan.batch_size:,} rows"
    waiting = text_table(
        f"Waiting time of the trainer (target: at most {plan.target:.0%})",
        ["readers per rank"],
        ["share of time"],
    )
    for readers in sorted({0, 1, 2, 4, 8, plan.readers or 0}):
        waiting.add_row(
            f"{'* ' if readers == plan.readers else ''}{readers}",
            f"{pace.stall_share(readers):.1%}",
        )
    return Group(measured, "", waiting, "", Text(plan.advice()))
