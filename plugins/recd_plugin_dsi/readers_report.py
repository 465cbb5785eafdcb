"""Costs of one reader and of the trainer alone on this machine.

The reader runs in a process of its own with one thread of torch, as the trainer's workers do, and
packs its blocks for the wire. The trainer then trains, on all ranks, on batches that lie ready.
Each takes several rounds, of which medians count: other load of the machine slows some of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugins.api import (
    STALL_CAUSES,
    BatchBlock,
    Job,
    MakingTimes,
    Pace,
    ReadTask,
    RunConfig,
    assemble,
    available_cores,
    backend_for,
    build_model,
    choose_device,
    clock_of,
    decode,
    device_of_rank,
    encode,
    launch,
    peak_bytes,
    plot_style,
    prepare,
    read_task,
    silence_upstream,
    size_text,
    wrapped_dataset,
    write_figure,
)

_ROUNDS = 5
# Of a round: whole blocks, until there are so many batches and so many seconds.
_READ_BATCHES, _READ_SECONDS = 8, 0.5
# Batches that lie ready, and steps of a round, after those that fill the pipeline.
_READY, _STEPS, _WARMUP = 8, 8, 4


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


def study_readers(
    registry: RunConfig,
    plugins_dir: Path | None,
    batch_size: int,
    target: float,
    show: Callable[[str], None],
) -> ReaderPlan:
    """Read with one reader, train on ``training.ranks`` ranks, and plan readers.

    Args:
        registry: not prepared.
        plugins_dir: of the registry.
        batch_size: rows of a rank.
        target: the share of its time that the trainer may wait.
        show: called with each step.
    """
    overrides = {"batch_size": batch_size, "checkpoint": {}, "ranks_per_node": None}
    registry = _without_stores(registry.with_training(overrides))
    ranks = registry.training.ranks
    wrapped_dataset(registry).prepare()
    device = choose_device(registry)
    job = Job(
        registry.path,
        plugins_dir=plugins_dir,
        overrides=overrides,
        device=device,
        text=registry.text,
    )
    show("reading with one reader")
    with torch.device("meta"):
        prepared = prepare(registry, build_model(registry, registry.dataset.schema()))
    work = read_task(registry, 0, ranks, prepared=prepared)
    reader = wrapped_dataset(registry).reader(
        rank=0, world_size=ranks, batch_size=batch_size, split="train"
    )
    blocks = reader.num_blocks()
    reading = launch(_read, 1, work, reader.state_dict(), threads=1)[0]
    show("training on batches that lie ready")
    trained = launch(_train, ranks, job, backend=backend_for(device))
    return ReaderPlan(
        reading=reading,
        training=max(trained, key=lambda rank: rank.seconds),
        block=len(reader) / blocks if blocks else 1.0,
        target=target,
        batch_size=batch_size,
        ranks=ranks,
        cores=available_cores(),
    )


def _read(_rank: int, _world_size: int, work: ReadTask, position: dict[str, Any]) -> Reading:
    silence_upstream()
    reader = work.open()
    blocks = _endless(lambda: reader.blocks(position, 0, 1))
    _round(blocks, batches=1, seconds=0.0)
    rounds = [_round(blocks, _READ_BATCHES, _READ_SECONDS) for _ in range(_ROUNDS)]
    return Reading(
        MakingTimes(
            **{
                part.name: median(
                    fmean(getattr(made, part.name) for made in each.making) for each in rounds
                )
                for part in fields(MakingTimes)
            }
        ),
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
    """Read, pack and unpack some blocks; unpacking is no work of a reader."""
    found = _Round([])
    start = time.perf_counter()
    while len(found.making) < batches or time.perf_counter() - start < seconds:
        begun = time.process_time()
        block = next(blocks)
        packing = time.perf_counter()
        packed = encode(block)
        found.cpu_seconds += time.process_time() - begun
        found.bytes += packed.nbytes
        unpacking = time.perf_counter()
        unpacked = decode(packed)
        moved = unpacked.moved(unpacking - packing, time.perf_counter() - unpacking)
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


def _train(rank: int, world_size: int, job: Job) -> Training:
    silence_upstream()
    device = device_of_rank(job.device)
    registry = _without_stores(job.load())
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


def _without_stores(registry: RunConfig) -> RunConfig:
    """Let ranks read by themselves, without caches, whose files belong to runs."""
    return replace(registry.with_training({"workers": 0}), cache=(), ingestion=None)


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# Numbers of readers that are shown, at the most.
_LINES = 12


@dataclass(frozen=True)
class ReadersPoint:
    """So many readers of each rank.

    Attributes:
        readers: 0 where ranks read by themselves.
        share: of its time, what the trainer waits where every process has a core.
        share_here: on the cores of this machine.
        cores: busy on a node, readers and ranks.
    """

    readers: int
    share: float
    share_here: float
    cores: float


@dataclass(frozen=True)
class ReaderPlan:
    """The report of ``recd plan --readers``.

    Attributes:
        reading, training: what was measured.
        block: batches of a block, a mean.
        target: share of its time that the trainer may wait.
        batch_size: rows of a batch of one rank.
        ranks: of the training.
        cores: of this machine.
    """

    reading: Reading
    training: Training
    block: float
    target: float
    batch_size: int
    ranks: int
    cores: int

    @cached_property
    def pace(self) -> Pace:
        """What the rule goes by."""
        making = self.reading.making
        return Pace(
            making=making.reader,
            training=self.training.seconds,
            making_deviation=self.reading.deviation,
            training_deviation=self.training.deviation,
            arrival=making.arrival + self.training.pin_seconds,
            block=self.block,
        )

    @cached_property
    def readers(self) -> int | None:
        """Readers of a rank for the target; 0 where it may read by itself, None where none do."""
        return 0 if self.pace.stall_share(0) <= self.target else self.pace.readers_for(self.target)

    @property
    def trainer_cores(self) -> float:
        """Busy with the ranks of this machine while they do not wait."""
        return self.ranks * self.training.cpu_seconds / self.training.seconds

    @property
    def reader_cores(self) -> float:
        """Busy with the readers of these ranks while they keep up, whatever their number."""
        return self.ranks * self.reading.cpu_seconds / self.pace.taking

    @property
    def cores_suffice(self) -> bool:
        """Whether ranks and readers have cores enough on this machine."""
        return self.trainer_cores + self.reader_cores <= self.cores

    @property
    def bytes_per_second(self) -> float:
        """What the readers of one rank send it."""
        return self.reading.batch_bytes / self.pace.taking

    def point(self, readers: int) -> ReadersPoint:
        """What so many readers would give."""
        share = self.pace.stall_share(readers)
        # A step is never shorter than the processors' work for it, shared out to all cores.
        work = self.training.cpu_seconds + self.reading.cpu_seconds
        least = self.ranks * work / self.cores
        step = self.training.seconds / (1 - share) if share < 1 else float("inf")
        stretched = max(step, least)
        share_here = max(share, 1 - self.training.seconds / stretched)
        return ReadersPoint(readers, share, share_here, self.ranks * work / stretched)

    @cached_property
    def curve(self) -> list[ReadersPoint]:
        """The points from no reader to twice as many as it takes."""
        last = max(4, 2 * (self.readers or 1)) if self.readers is not None else 8
        step = max(1, last // _LINES)
        numbers = sorted({0, 1, *range(step, last + 1, step), *filter(None, [self.readers])})
        return [self.point(number) for number in numbers]

    @property
    def share_here(self) -> float:
        """The share of its time that the trainer would wait here with the readers it takes."""
        return min(point.share_here for point in self.curve)

    def as_json(self) -> dict[str, Any]:
        """JSON values; times in seconds."""
        making = self.reading.making
        readers = self.readers
        return {
            "stall_target": self.target,
            "readers_per_rank": readers,
            "readers": None if readers is None else readers * self.ranks,
            "batch_size": self.batch_size,
            "ranks": self.ranks,
            "block_batches": self.block,
            "reader": {
                **{f"{cause}_seconds": getattr(making, cause) for cause in STALL_CAUSES},
                "batch_seconds": self.pace.making,
                "arrival_seconds": self.pace.arrival,
                "deviation_seconds": self.reading.deviation,
                "cpu_seconds": self.reading.cpu_seconds,
                "batch_bytes": self.reading.batch_bytes,
                "memory_bytes": self.reading.memory_bytes,
            },
            "trainer": asdict(self.training),
            "cores": {
                "machine": self.cores,
                "trainer": self.trainer_cores,
                "readers": self.reader_cores,
                "suffice": self.cores_suffice,
            },
            "bytes_per_second_of_a_rank": self.bytes_per_second,
            "curve": [asdict(point) for point in self.curve],
            "advice": self.advice(),
        }

    def advice(self) -> str:
        """What to set, in words."""
        pace, readers = self.pace, self.readers
        if readers == 0:
            return (
                f"no reader is needed: ranks that read by themselves wait "
                f"{pace.stall_share(0):.1%} of their time (training.workers: 0)"
            )
        if readers is None:
            return (
                f"no number of readers gets below {self.target:.0%}: unpacking and pinning a batch "
                f"take {pace.arrival * 1e3:.3g} ms of the trainer, a step {pace.training * 1e3:.3g}"
            )
        waits = f"{self.point(readers).share:.1%} of their time for data"
        if self.cores_suffice:
            return f"training.workers: {readers}: ranks then wait about {waits}"
        left = max(0.0, self.cores - self.trainer_cores)
        return (
            f"{readers} readers a rank, and ranks would wait about {waits}; but this machine has "
            f"no cores for them: they are busy with {self.reader_cores:.1f}, and beside the "
            f"trainer's {self.trainer_cores:.1f} there are {left:.1f} of {self.cores}. On this "
            f"machine ranks wait {self.share_here:.0%} at the least. Read on other machines "
            f"(ingestion: {{use: dsi.ray}}) with {self.reader_cores:.1f} cores for each node, or "
            "store the data as a reader needs it: clustered, with list_dict, preprocessed"
        )


def render(plan: ReaderPlan) -> RenderableType:
    """What was measured, what so many readers give, and what to set."""
    return Group(_measured(plan), "", _curve(plan), "", _needs(plan), Text(plan.advice()))


def _measured(plan: ReaderPlan) -> Table:
    table = _new("Seconds of a batch of one rank", "", "ms")
    making = plan.reading.making
    for cause in STALL_CAUSES:
        table.add_row(cause, f"{getattr(making, cause) * 1e3:.2f}")
    table.add_row("one reader", f"{plan.pace.making * 1e3:.2f}")
    table.add_row("  of processors", f"{plan.reading.cpu_seconds * 1e3:.2f}")
    table.add_row("unpacking, in the trainer", f"{plan.pace.arrival * 1e3:.2f}")
    table.add_row("trainer, on ready batches", f"{plan.training.seconds * 1e3:.2f}")
    table.add_row("  of processors", f"{plan.training.cpu_seconds * 1e3:.2f}")
    table.caption = f"{plan.batch_size:,} rows; medians"
    return table


def _curve(plan: ReaderPlan) -> Table:
    columns = "readers of a rank", "trainer waits", "on this machine", "cores of a node"
    table = _new(f"Waiting, by readers; wanted: at most {plan.target:.0%}", *columns)
    for point in plan.curve:
        chosen = point.readers == plan.readers
        table.add_row(
            f"{'* ' if chosen else ''}{point.readers}",
            f"{point.share:.1%}",
            f"{point.share_here:.1%}",
            f"{point.cores:.1f} of {plan.cores}",
            style="bold" if chosen else "",
        )
    return table


def _needs(plan: ReaderPlan) -> Text:
    readers, memory = plan.readers or 0, plan.reading.memory_bytes
    wire = (
        f"a batch has {size_text(plan.reading.batch_bytes)} on the wire: "
        f"{size_text(plan.bytes_per_second)}/s to a rank"
    )
    if not readers:
        return Text(wire)
    return Text(
        f"readers: {readers} of a rank, {readers * plan.ranks} in all; memory "
        f"{size_text(memory)} each, {size_text(readers * plan.ranks * memory)} in all\n{wire}"
    )


def _new(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


@plot_style()
def plot(plan: ReaderPlan, path: Path) -> None:
    """What the trainer waits by readers of a rank, with the target and the chosen number."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    numbers = [point.readers for point in plan.curve]
    axes.plot(numbers, [point.share for point in plan.curve], "o-", label="a core for each reader")
    axes.plot(
        numbers,
        [point.share_here for point in plan.curve],
        "s--",
        label=f"on this machine: {plan.cores} cores",
    )
    axes.axhline(plan.target, color="gray", linestyle=":", label=f"wanted: {plan.target:.0%}")
    if plan.readers is not None:
        axes.axvline(plan.readers, color="red", alpha=0.4, label=f"{plan.readers} readers")
    axes.set(xlabel="readers of a rank", ylabel="trainer waits", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    write_figure(path, figure)
