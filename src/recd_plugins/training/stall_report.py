"""What the ranks of a run waited for data, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from recd_plugins.cores import available_cores
from recd_plugins.data.stalls import STALL_TARGET, Pace, Stalls
from recd_plugins.values.batch import STALL_CAUSES

#: Speed of fewer timed steps is not to be believed.
FEW_STEPS = 5


@dataclass(frozen=True)
class StallReport:
    """Stalls of a run.

    Attributes:
        ranks: by rank.
        workers: processes that read for each rank.
        block: adjacent batches that a reader makes at a time.
        ingestion: name of the plugin that reads in their place, if one does.
    """

    ranks: tuple[Stalls, ...]
    workers: int
    block: float = 1.0
    ingestion: str | None = None

    @classmethod
    def of(
        cls,
        ranks: Sequence[Stalls | None],
        workers: int,
        block: float = 1.0,
        ingestion: str | None = None,
    ) -> StallReport | None:
        """None for a run too short to tell."""
        known = tuple(rank for rank in ranks if rank is not None)
        return cls(known, workers, block, ingestion) if len(known) == len(ranks) else None

    @property
    def share(self) -> float:
        """The waiting share of a step, the mean over ranks."""
        return sum(self.mean_shares().values())

    @property
    def worst_rank(self) -> int:
        """The rank that waits longest, and lets the others wait in their collectives."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].share)

    @property
    def worst(self) -> Stalls:
        """The stalls of the worst rank."""
        return self.ranks[self.worst_rank]

    def mean_shares(self) -> dict[str, float]:
        """The waiting shares of a step by cause, the mean over ranks."""
        shares = [rank.shares() for rank in self.ranks]
        return {cause: sum(each[cause] for each in shares) / len(shares) for cause in STALL_CAUSES}

    @property
    def readers(self) -> int | None:
        """Readers of each rank that would do, by the worst rank; None where no number would."""
        return pace_of(self.worst, self.block).readers_for(STALL_TARGET)

    def as_json(self) -> dict[str, Any]:
        """JSON values: shares of a step, and of each rank seconds."""
        worst = self.worst
        return {
            "share": self.share,
            "shares": self.mean_shares(),
            "worst": {"rank": self.worst_rank, "share": worst.share, "shares": worst.shares()},
            "steps": worst.steps,
            "readers_needed": self.readers,
            "ranks": [asdict(rank) for rank in self.ranks],
        }

    def advice(self) -> str:
        """What to do, in words; empty where the trainer hardly waits, or it cannot be told yet."""
        worst = self.worst
        if worst.share <= STALL_TARGET or worst.steps < FEW_STEPS:
            return ""
        causes = worst.seconds
        cause = max(causes, key=lambda name: causes[name])
        waits = f"The trainer waits {worst.share:.0%} of a step for data, most for {cause}. "
        readers = self.readers
        if readers is None:
            return waits + (
                f"Unpacking and pinning a batch take {worst.making.arrival * 1e3:.1f} ms of the "
                f"{worst.training_seconds * 1e3:.1f} ms step: more readers do not help; larger "
                "batches or fewer features do"
            )
        took = (
            f"a batch takes {worst.making.reader * 1e3:.1f} ms to make and "
            f"{worst.training_seconds * 1e3:.1f} ms to train on"
        )
        if self.ingestion is not None and readers == 1:  # none has fewer
            return waits + (
                f"One reader for each rank would do if it had a core ({took}): give the readers "
                f"of {self.ingestion} cores, or let them read further ahead"
            )
        if self.ingestion is not None:
            return waits + (
                f"{readers} readers for each rank would do ({took}): raise the bounds "
                f"of {self.ingestion}, or give its readers cores"
            )
        elsewhere = (
            f"this machine has {available_cores()} cores for {len(self.ranks)} x (1 + "
            f"{max(readers, self.workers)}) processes: where readers compute and do not wait, name "
            "an ingestion that reads on other machines"
        )
        if readers <= self.workers:
            return (
                waits + f"{self.workers} workers would do if each had a core ({took}): {elsewhere}"
            )
        advised = waits + f"training.workers: {readers} would do ({took})"
        if len(self.ranks) * (1 + readers) > available_cores():
            advised += f"; but {elsewhere}"
        return advised


def stall_advice(reports: Mapping[str, StallReport]) -> list[str]:
    """What to do in each run that waits; the name of a lone run is not shown."""
    advice = {name: report.advice() for name, report in reports.items()}
    return [f"{name}: {each}" if name else each for name, each in advice.items() if each]


def stall_table(reports: Mapping[str, StallReport]) -> Table:
    """Shares of a step by cause, runs side by side; the name of a lone run is not shown."""
    table = Table(title="waiting for data, share of a step")
    table.add_column("")
    for name in reports:
        for which in ("mean", "worst rank"):
            table.add_column(f"{name} {which}".strip(), justify="right", overflow="fold")
    columns = [
        shares
        for report in reports.values()
        for shares in (report.mean_shares(), report.worst.shares())
    ]
    for cause in STALL_CAUSES:
        table.add_row(cause, *(f"{shares[cause]:.1%}" for shares in columns))
    table.add_row("all", *(f"{sum(shares.values()):.1%}" for shares in columns))
    steps = ", ".join(str(report.worst.steps) for report in reports.values())
    table.caption = f"of {steps} steps" if len(reports) > 1 else f"of {steps} steps, all ranks"
    return table


def pace_of(stalls: Stalls, block: float = 1.0) -> Pace:
    """What a run shows of its readers' pace and its trainer's."""
    return Pace(
        making=stalls.making.reader,
        training=stalls.training_seconds,
        making_deviation=stalls.making_deviation,
        training_deviation=stalls.training_deviation,
        arrival=stalls.making.arrival,
        block=block,
    )
