"""The report of what ``auto`` chose: what the next best would cost, and what limits a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table as TextTable
from rich.text import Text

from recd_plugin_tuning.groups import Group, offered
from recd_plugin_tuning.lines import entry_line, patterns_of
from recd_plugin_tuning.trials import Choices, Evaluations
from recd_plugins.api import Candidate, Choice, SearchContext, StageCosts, StageTimes, StepCost

_PLANNER = "the planner"
# What a second of a stage is of, where the kind of work tells more.
_LINKS = {
    "bytes_across_nodes": "links between nodes",
    "bytes_in_node": "links in nodes",
    "collectives": "latency of collectives",
}
_STAGES = {
    "lookup": "lookups in memory",
    "gemm": "compute",
    "all_reduce": "reducing gradients",
    "other": "compute",
}


@dataclass(frozen=True)
class GroupChoice:
    """What was chosen for some tables.

    Attributes:
        tables: their names.
        pooled: whether they are looked up in bags.
        offer: that was chosen; None left them to the planner.
        others: other choices that were tried, and seconds of the shortest step that was found with
            each, the shortest first.
        refused: offers that cannot be, with why.
    """

    tables: tuple[str, ...]
    pooled: bool
    offer: Candidate | None
    others: tuple[tuple[Candidate | None, float], ...]
    refused: tuple[tuple[Candidate, str], ...]

    @property
    def next(self) -> tuple[Candidate | None, float] | None:
        """The second choice; None where no other was tried."""
        return next(iter(self.others), None)


@dataclass(frozen=True)
class Chosen(Choice):
    """What ``auto`` chose.

    Attributes:
        offered: see ``Choice``.
        groups: of its tables.
        others: names of tables that it was not asked for.
        seconds: of a step with what was chosen, without what the model computes.
        busiest: the work of the rank that sends most.
        planner: seconds of one with everything left to the planner; None where that has no plan.
        costs: of what a step does.
        num_trials: plans that were made.
        compute: seconds of what the model computes, where that is known: whatever is chosen.
        measured: whether costs were; a terminal shows no milliseconds of others, which order
            choices and predict no step.
    """

    name: ClassVar[str] = "auto"

    groups: tuple[GroupChoice, ...]
    others: tuple[str, ...]
    seconds: StageTimes
    busiest: StepCost
    planner: float | None
    costs: StageCosts
    num_trials: int
    compute: StageTimes | None = None
    measured: bool = True

    def __str__(self) -> str:
        chosen: dict[str, list[str]] = {}
        for each in self.groups:
            chosen.setdefault(str(each.offer or _PLANNER), []).extend(each.tables)
        words = ", ".join(f"{offer} for {_named(names)}" for offer, names in chosen.items())
        return f"auto takes {words}" + (f"; {self._predicted()}" if self.measured else "")

    def with_compute(self, compute: StageTimes) -> Chosen:
        """The same with the seconds of a step that do not depend on the tables."""
        return replace(self, compute=compute)

    def milliseconds(self, seconds: float) -> float:
        """Of a step that takes so many seconds without what the model computes."""
        return 1000 * (seconds + (0.0 if self.compute is None else self.compute.total))

    def limits(self) -> dict[str, float]:
        """Milliseconds of the step by what they are spent on, the most first."""
        found = dict.fromkeys((*_LINKS.values(), *_STAGES.values()), 0.0)
        for name, words in _LINKS.items():
            found[words] += getattr(self.costs.all_to_all, name) * getattr(self.busiest, name)
        waited = self.seconds.all_to_all - sum(found.values())
        found["waiting for the rank with the most to do"] = max(0.0, waited)
        # Else what links carry while ranks compute.
        across = _LINKS["bytes_across_nodes"]
        found[across] = max(0.0, found[across] + min(0.0, waited))
        for times in (self.seconds, self.compute):
            for stage, words in _STAGES.items():
                found[words] += 0.0 if times is None else getattr(times, stage)
        return dict(
            sorted(((k, 1000 * s) for k, s in found.items() if s), key=lambda each: -each[1])
        )

    def lines(self) -> str:
        """What says the same in a registry file: the section, or what takes the entry's place.

        There may be other entries where there are other tables.
        """
        every = [*self.others, *(name for each in self.groups for name in each.tables)]
        lines = [
            entry_line(offer, patterns_of(names, [n for n in every if n not in set(names)]))
            for offer, names in self.offered
        ]
        if not self.others:
            return "\n".join(["sharding:", *lines]) if lines else "sharding: []"
        instead = "in place of its entry" if lines else "its entry is left out"
        return "\n".join([f"# sharding: {instead}", *lines])

    def as_json(self) -> Any:
        """JSON values."""
        return {
            "milliseconds": self.milliseconds(self.seconds.total),
            "milliseconds_of_the_planner": self.planner and self.milliseconds(self.planner),
            "with_compute": self.compute is not None,
            "measured": self.measured,
            "groups": [
                {
                    "tables": list(each.tables),
                    "pooled": each.pooled,
                    "chosen": _json(each.offer),
                    "next_best": each.next and self._other(*each.next),
                    "others": [self._other(*other) for other in each.others],
                    "refused": [{**offer.as_json(), "why": why} for offer, why in each.refused],
                }
                for each in self.groups
            ],
            "limits": self.limits(),
            "plans_tried": self.num_trials,
            "registry": self.lines(),
        }

    def _other(self, offer: Candidate | None, seconds: float) -> dict[str, Any]:
        return {"chosen": _json(offer), "milliseconds": self.milliseconds(seconds)}

    def shown(self, run: str) -> Sequence[RenderableType]:
        """What the terminal shows."""
        return [
            self._table(run),
            Text("\n".join(self._words())),
            Text(f"the same without auto:\n{self.lines()}"),
        ]

    def _table(self, run: str) -> TextTable:
        side = "" if run == self.name else run
        table = TextTable(
            title=f"{side} auto: what was chosen, for tables that are alike".strip(),
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        others = "others, and ms of a step with them" if self.measured else "others, the best first"
        for column in ("tables", "chosen", others):
            table.add_column(column, overflow="fold")
        for each in self.groups:
            table.add_row(
                _named(each.tables) + ("" if each.pooled else ", sequences"),
                str(each.offer or _PLANNER),
                "\n".join(
                    f"{offer or _PLANNER}"
                    + (f": {self.milliseconds(seconds):.1f}" if self.measured else "")
                    for offer, seconds in each.others
                ),
            )
        return table

    def _words(self) -> Iterator[str]:
        tried = f"{self.num_trials} plans were tried"
        if self.measured:
            yield f"{self._predicted()} ({tried})"
            limits = self.limits().items()
            yield "it is spent on " + ", ".join(f"{words} {ms:.1f}" for words, ms in limits)
        else:
            yield f"{tried}, by bandwidths; recd calibrate measures what predicts a step"
        for each in self.groups:
            for offer, why in each.refused:
                yield f"not for {_named(each.tables)}: {offer}: {why}"

    def _predicted(self) -> str:
        step = "a step" if self.compute is not None else "the tables' part of a step"
        beside = "no plan fits"
        if self.planner is not None:
            beside = f"{self.milliseconds(self.planner):.1f} ms"
        return (
            f"predicted: {self.milliseconds(self.seconds.total):.1f} ms for {step}; with all of "
            f"them left to the planner: {beside}"
        )


def chosen(
    trials: Evaluations, groups: Sequence[Group], best: Choices, question: SearchContext
) -> Chosen:
    """The report of the best choices, which have a plan, next to all that was tried."""
    found, start = trials(best), trials((None,) * len(groups))
    assert found.seconds is not None, "it is the best"
    made = trials.made
    choices = []
    for number, (group, offer) in enumerate(zip(groups, best, strict=True)):
        tried = [(other[number], trial) for other, trial in made.items() if other[number] != offer]
        # The shortest step with each comes last, and stays.
        longest_first = sorted(tried, key=lambda each: -each[1].total)
        possible = {o: trial.total for o, trial in longest_first if trial.seconds is not None}
        refused = {o: trial.why for o, trial in tried if o and trial.error and o not in possible}
        choices.append(
            GroupChoice(
                group.names,
                group.pooled,
                offer,
                tuple(sorted(possible.items(), key=lambda each: each[1])),
                tuple(refused.items()),
            )
        )
    return Chosen(
        offered((each.tables, each.offer) for each in choices),
        tuple(choices),
        tuple(question.others),
        found.seconds,
        max(found.works, key=question.costs.all_to_all.seconds),
        None if start.seconds is None else start.total,
        question.costs,
        len(made),
        measured=question.setting.measured,
    )


def _named(tables: Sequence[str]) -> str:
    return tables[0] if len(tables) == 1 else f"{tables[0]} ... {tables[-1]} ({len(tables)})"


def _json(offer: Candidate | None) -> dict[str, Any] | None:
    return None if offer is None else offer.as_json()
