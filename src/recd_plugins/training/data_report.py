"""Reports on the data of a run: waiting for batches, and batches by group of rows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from recd_plugins.data.stalls import STALL_TARGET, Pace, Stalls
from recd_plugins.interfaces.batch import STALL_CAUSES
from recd_plugins.runtime.machine import available_cores

#: Speed of fewer timed steps says little.
FEW_STEPS = 5
#: The group of a batch with rows of several groups.
MIXED = "mixed"


@dataclass(frozen=True)
class StallReport:
    """Stalls of a run."""

    ranks: tuple[Stalls, ...]
    workers: int
    ingestion: str | None = None

    @classmethod
    def of(
        cls,
        ranks: Sequence[Stalls | None],
        workers: int,
        ingestion: str | None = None,
    ) -> StallReport | None:
        """Return None for a run too short to tell."""
        known = tuple(rank for rank in ranks if rank is not None)
        return cls(known, workers, ingestion) if len(known) == len(ranks) else None

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
        """Return the waiting shares of a step by cause, the mean over ranks."""
        shares = [rank.shares() for rank in self.ranks]
        return {cause: sum(each[cause] for each in shares) / len(shares) for cause in STALL_CAUSES}

    @property
    def readers(self) -> int | None:
        """Readers of each rank that would do, by the worst rank; None if no number would."""
        worst = self.worst
        pace = Pace(
            making=worst.making.reader,
            training=worst.training_seconds,
            arrival=worst.making.arrival,
        )
        return pace.readers_for(STALL_TARGET)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values: shares of a step, and seconds of each rank."""
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
        """Return what to do; empty if the trainer hardly waits, or it cannot be told yet."""
        worst = self.worst
        if worst.share <= STALL_TARGET or worst.steps < FEW_STEPS:
            return ""
        cause = max(worst.seconds, key=lambda name: worst.seconds[name])
        waits = f"The trainer waits {worst.share:.0%} of a step for data, most for {cause}. "
        step = f"{worst.training_seconds * 1e3:.1f} ms"
        readers = self.readers
        if readers is None:
            return waits + (
                f"Unpacking and pinning a batch take {worst.making.arrival * 1e3:.1f} ms of the "
                f"{step} step: more readers do not help; larger batches or fewer features do"
            )
        took = f"a batch takes {worst.making.reader * 1e3:.1f} ms to make and {step} to train on"
        if self.ingestion is not None:
            return waits + (
                f"{readers} readers for each rank would do ({took}): raise the bounds of "
                f"{self.ingestion}, or give its readers cores"
            )
        if readers <= self.workers:
            advised = f"{self.workers} workers would do if each had a core ({took})"
        else:
            advised = f"training.workers: {readers} would do ({took})"
        if readers <= self.workers or len(self.ranks) * (1 + readers) > available_cores():
            advised += f"; but this machine has {available_cores()} cores: use an ingestion plugin"
        return waits + advised


def stall_advice(reports: Mapping[str, StallReport]) -> list[str]:
    """Return what to do in each run that waits; the name of a lone run is empty."""
    advice = {name: report.advice() for name, report in reports.items()}
    return [f"{name}: {each}" if name else each for name, each in advice.items() if each]


def stall_table(reports: Mapping[str, StallReport]) -> Table:
    """Show shares of a step by cause, runs side by side."""
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


class GroupCount:
    """Counts the batches that a rank trains on by the groups of their rows."""

    def __init__(self) -> None:
        self.samples = Counter[str]()
        # Sent to every rank, millions after days: two bytes a batch.
        self._names: list[str] = []
        self._steps = array("H")

    @property
    def steps(self) -> Iterator[str]:
        """The group of each batch, or ``MIXED``."""
        return map(self._names.__getitem__, self._steps)

    def add(self, groups: Mapping[str, int]) -> None:
        """Add a batch, by its number of rows of each group."""
        if groups:
            self.samples.update(groups)
            group = next(iter(groups)) if len(groups) == 1 else MIXED
            if group not in self._names:
                self._names.append(group)
            self._steps.append(self._names.index(group))


@dataclass(frozen=True)
class GroupShare:
    """What was trained on of one group.

    Attributes:
        name: of the group, or ``MIXED``.
        samples: of all ranks; none of ``MIXED``, whose samples belong to the groups.
        share: of all samples.
        expected: share that the wrapper expects, if it says.
        batches: of all ranks.
        steps: in which every rank's batch was of the group.
    """

    name: str
    samples: int
    share: float
    expected: float | None
    batches: int
    steps: int


@dataclass(frozen=True)
class GroupReport:
    """The groups of a run since it was started or resumed; ``MIXED`` last."""

    groups: tuple[GroupShare, ...]

    @classmethod
    def of(cls, ranks: Sequence[GroupCount], expected: Mapping[str, float]) -> GroupReport | None:
        """Merge what ranks counted; None if no batch had groups."""
        samples = sum((rank.samples for rank in ranks), Counter[str]())
        if not samples:
            return None
        batches = Counter(group for rank in ranks for group in rank.steps)
        steps = zip(*(rank.steps for rank in ranks), strict=True)
        alike = Counter(step[0] for step in steps if len(set(step)) == 1)
        return cls(
            tuple(
                GroupShare(
                    name,
                    samples[name],
                    samples[name] / samples.total(),
                    expected.get(name),
                    batches[name],
                    alike[name],
                )
                for name in [*sorted(samples), MIXED]
            )
        )

    def as_json(self) -> dict[str, Any]:
        """Return JSON values by group."""
        return {group.name: asdict(group) for group in self.groups}

    def table(self, title: str = "") -> Table:
        """Show counted shares next to expected ones."""
        table = Table(title=f"samples by group {title}".strip())
        table.add_column("")
        for heading in ("samples", "expected", "batches", "steps of all ranks"):
            table.add_column(heading, justify="right", overflow="fold")
        for group in self.groups:
            table.add_row(
                group.name,
                "" if group.name == MIXED else f"{group.share:.1%}",
                "" if group.expected is None else f"{group.expected:.1%}",
                f"{group.batches:,}",
                f"{group.steps:,}",
            )
        return table
