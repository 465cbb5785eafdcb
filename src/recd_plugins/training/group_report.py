"""Batches by the groups into which a wrapper of the dataset sorts rows, such as hot and normal."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

#: Of a batch with rows of several groups.
MIXED = "mixed"


class GroupCount:
    """Counts the batches that a rank trains on.

    Attributes:
        samples: by group.
    """

    def __init__(self) -> None:
        self.samples = Counter[str]()
        # Every rank is told those of all, millions after days: two bytes of each.
        self._names: list[str] = []
        self._steps = array("H")

    @property
    def steps(self) -> Iterator[str]:
        """The group of each batch, or ``MIXED``."""
        return map(self._names.__getitem__, self._steps)

    def add(self, groups: Mapping[str, int]) -> None:
        """A batch by how many of its rows are of which group; nothing where none are named."""
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
        samples: of all ranks; of ``MIXED`` none, as its samples belong to the groups.
        share: of all samples.
        expected: share that the wrapper expects, None where it does not say.
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
    """The groups of a run, since it was started or resumed; that of mixed batches last."""

    groups: tuple[GroupShare, ...]

    @classmethod
    def of(cls, ranks: Sequence[GroupCount], expected: Mapping[str, float]) -> GroupReport | None:
        """What all ranks counted; None where no batch had groups.

        Args:
            ranks: what each counted.
            expected: share of samples by group, where a wrapper expects some.
        """
        samples = sum((rank.samples for rank in ranks), Counter[str]())
        if not samples:
            return None
        batches = Counter(group for rank in ranks for group in rank.steps)
        alike = Counter(
            step[0]
            for step in zip(*(rank.steps for rank in ranks), strict=True)
            if len(set(step)) == 1
        )
        names = [*sorted(samples), MIXED]
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
                for name in names
            )
        )

    def as_json(self) -> dict[str, Any]:
        """JSON values by name of the group."""
        return {group.name: asdict(group) for group in self.groups}

    def table(self, title: str = "") -> Table:
        """Counted shares next to expected ones."""
        table = Table(title=" ".join(filter(None, ["samples by group", title])))
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
