"""The report of ``recd plan --readers``: how many readers a registry takes on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from recd_plugin_dsi.measure import Reading, Training
from recd_plugins.api import STALL_CAUSES, Pace, plot_style, size_text, write_figure

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
        ranks_here: that this machine would run: all of a node.
        cores: of this machine.
    """

    reading: Reading
    training: Training
    block: float
    target: float
    batch_size: int
    ranks: int
    ranks_here: int
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
        return self.ranks_here * self.training.cpu_seconds / self.training.seconds

    @property
    def reader_cores(self) -> float:
        """Busy with the readers of these ranks while they keep up, whatever their number."""
        return self.ranks_here * self.reading.cpu_seconds / self.pace.taking

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
        least = self.ranks_here * work / self.cores
        step = self.training.seconds / (1 - share) if share < 1 else float("inf")
        stretched = max(step, least)
        share_here = max(share, 1 - self.training.seconds / stretched)
        return ReadersPoint(readers, share, share_here, self.ranks_here * work / stretched)

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
            "readers_per_node": None if readers is None else readers * self.ranks_here,
            "readers": None if readers is None else readers * self.ranks,
            "batch_size": self.batch_size,
            "ranks": self.ranks,
            "ranks_per_node": self.ranks_here,
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
            "bytes_per_second_of_a_node": self.bytes_per_second * self.ranks_here,
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
    readers = plan.readers or 0
    on_node = readers * plan.ranks_here
    memory = plan.reading.memory_bytes
    lines = [
        f"readers: {readers} of a rank, {on_node} of a node, {readers * plan.ranks} in all; "
        f"memory {size_text(memory)} each, {size_text(on_node * memory)} on a node",
        f"a batch has {size_text(plan.reading.batch_bytes)} on the wire: "
        f"{size_text(plan.bytes_per_second)}/s to a rank, "
        f"{size_text(plan.bytes_per_second * plan.ranks_here)}/s to a node",
    ]
    return Text("\n".join(lines if readers else lines[1:]))


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
