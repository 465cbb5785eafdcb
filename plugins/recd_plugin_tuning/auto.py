"""Sharding ``auto``: searches the candidates of other shardings for the shortest predicted step."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from math import floor, log
from typing import TYPE_CHECKING, Any, ClassVar

from recd_plugins.api import Sharding, Table, choosing, data_profiles, hookimpl

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as TextTable

REQUIRES_API = 5

#: Maps each group to its candidate; None uses TorchRec's planner.
Choices = tuple[choosing.Candidate | None, ...]

_PLANNER = "the planner"
# Tables are grouped if their rows, and their ids per row, differ by less than these factors.
_ROWS, _IDS = 10.0, 4.0
# Smaller savings are within the error of the estimates.
_LEAST_GAIN = 0.03
# Limit for pooled tables, where coalescing with estimated savings of 6 % was 13 to 17 % slower.
_LEAST_GAIN_POOLED = 0.1
# Choices up to this much slower on a sample are evaluated on all data, two at a time.
_NEAR, _AT_ONCE = 0.15, 2
# Maximum share of its time that a group is assumed to save.
_SAVED_ALONE = 0.5


class Auto(choosing.Chooser):
    """Sharding plugin that chooses the candidate with the shortest predicted step per table."""

    name = "auto"

    def choose(self, question: choosing.SearchContext) -> choosing.Choice:
        """Search for the best candidates, starting with TorchRec's planner for all tables."""
        groups = groups_of(question)
        evaluations = Evaluations(question, groups)
        best = best_choices(evaluations, groups)
        if evaluations(best).seconds is None:
            error = evaluations((None,) * len(groups)).error
            assert error is not None, "the search starts there"
            raise error
        return _chosen(evaluations, groups, best, question)


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    return [Auto]


@dataclass(frozen=True)
class Group:
    """Similar tables, which all get the same sharding candidate."""

    tables: tuple[Table, ...]
    offers: tuple[choosing.Candidate, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(table.name for table in self.tables)

    @property
    def pooled(self) -> bool:
        """Whether the tables belong to an EmbeddingBagCollection."""
        return self.tables[0].pooled

    @property
    def least_gain(self) -> float:
        """Minimum fraction of the step time that a changed candidate must save."""
        return _LEAST_GAIN_POOLED if self.pooled else _LEAST_GAIN


def groups_of(question: choosing.SearchContext) -> list[Group]:
    """Group similar tables. The groups are ordered by their first table."""
    alike: dict[tuple[Any, ...], list[Table]] = {}
    profile = question.context.data.profile()
    for table in question.tables:
        alike.setdefault(_key(table, profile), []).append(table)
    return [Group(tuple(some), tuple(question.offers(some))) for some in alike.values()]


def _key(table: Table, profile: data_profiles.DataProfile) -> tuple[Any, ...]:
    features = [profile.of(name) for name in table.features]
    ids = sum(feature.length for feature in features)
    return (
        table.pooled,
        table.embedding_dim,
        any(feature.deduplicated for feature in features),
        floor(log(table.num_embeddings, _ROWS)),
        floor(log(ids, _IDS)) if ids else None,
    )


class Evaluations:
    """Cache of estimated step costs. The key is a tuple with one candidate per group of tables."""

    def __init__(self, question: choosing.SearchContext, groups: Sequence[Group]) -> None:
        self._question, self._groups = question, groups
        self.made: dict[Choices, choosing.Evaluation] = {}
        self._settled: set[Choices] = set()

    def __call__(self, choices: Choices) -> choosing.Evaluation:
        """Return the cached estimate for ``choices``, or estimate it on a sample of the data."""
        if choices not in self.made:
            self.made[choices] = self._evaluation(choices, fast=True)
        return self.made[choices]

    def settle(self, choices: Choices) -> bool:
        """Estimate ``choices`` on all data. Return whether this was done before."""
        if settled := choices in self._settled:
            return settled
        self._settled.add(choices)
        self.made[choices] = self._evaluation(choices, fast=False)
        return settled

    def seconds_without(self, choices: Choices, numbers: Collection[int]) -> float:
        """Return the estimated step time in seconds without the tables of groups ``numbers``."""
        left_out = frozenset(name for number in numbers for name in self._groups[number].names)
        return self(choices).without(left_out).total

    def _evaluation(self, choices: Choices, *, fast: bool) -> choosing.Evaluation:
        names = (group.names for group in self._groups)
        found = self._question.evaluate(_offered(zip(names, choices, strict=True)), fast=fast)
        without = cache(found.without)  # the search evaluates the same tables repeatedly
        return replace(found, without=lambda names: without(frozenset(names)))


def _offered(chosen: Iterable[tuple[Sequence[str], choosing.Candidate | None]]) -> choosing.Offered:
    """Return each chosen candidate with the tables of all groups that use it."""
    names: dict[str, tuple[choosing.Candidate, list[str]]] = {}
    for tables, candidate in chosen:
        if candidate is not None:
            names.setdefault(candidate.key, (candidate, []))[1].extend(tables)
    return list(names.values())


def best_choices(evaluations: Evaluations, groups: Sequence[Group]) -> Choices:
    """Search for one candidate per group, so that the estimated step is shortest.

    Starts with TorchRec's planner for all tables and compares estimates on a sample of the data.
    The best choices are then estimated on all data, and the search is repeated.
    """
    start: Choices = (None,) * len(groups)
    if not any(group.offers for group in groups):
        evaluations.settle(start)
        return start
    while True:
        best = _search(evaluations, groups, start)
        if all(evaluations.settle(each) for each in (best, *_near(evaluations, best))):
            return best


def _near(evaluations: Evaluations, best: Choices) -> list[Choices]:
    made, most = evaluations.made, evaluations(best).total * (1 + _NEAR)
    others = [each for each, found in made.items() if each != best and found.total < most]
    return sorted(others, key=lambda each: made[each].total)[:_AT_ONCE]


def _search(evaluations: Evaluations, groups: Sequence[Group], best: Choices) -> Choices:
    while True:
        before = best
        of_kind: list[Choices] = []
        for pooled in (False, True):
            kind = [number for number, group in enumerate(groups) if group.pooled == pooled]
            for other in _changed(best, groups, kind):
                of_kind.append(other)
                best = _better(evaluations, groups, other, best)
        for number in range(len(groups)):
            if not _matters(evaluations, groups, best, number):
                continue
            for other in _changed(best, groups, (number,)):
                if _may_be_better(evaluations, other, best, of_kind):
                    best = _better(evaluations, groups, other, best)
        if best == before:
            return best


def _better(
    evaluations: Evaluations, groups: Sequence[Group], choices: Choices, best: Choices
) -> Choices:
    """Return ``choices`` if it saves the ``least_gain`` of its changed groups, else ``best``."""
    least = max(g.least_gain for g, a, b in zip(groups, choices, best, strict=True) if a != b)
    return choices if evaluations(choices).total < evaluations(best).total * (1 - least) else best


def _matters(evaluations: Evaluations, groups: Sequence[Group], best: Choices, number: int) -> bool:
    """Return whether another candidate for group ``number`` could save enough time."""
    whole = evaluations(best).total
    if whole == float("inf"):
        return True
    alone = whole - evaluations.seconds_without(best, (number,))
    return alone * _SAVED_ALONE > whole * groups[number].least_gain


def _may_be_better(
    evaluations: Evaluations, choices: Choices, best: Choices, tried: Sequence[Choices]
) -> bool:
    """Return whether ``choices`` could beat ``best``, judged by the evaluated choices."""
    for other in tried:
        differing = [n for n, (a, b) in enumerate(zip(choices, other, strict=True)) if a != b]
        if evaluations(other).seconds is None:
            continue
        least = evaluations.seconds_without(other, differing)
        if least > evaluations(best).total * (1 - _LEAST_GAIN):
            return False
    return True


def _changed(
    choices: Choices, groups: Sequence[Group], numbers: Sequence[int]
) -> Iterator[Choices]:
    """Yield variants of ``choices`` in which groups ``numbers`` use one common candidate."""
    offered = {offer.key: offer for number in numbers for offer in groups[number].offers}
    for offer in (None, *offered.values()) if numbers else ():
        other = tuple(
            offer
            if number in numbers and (offer is None or offer in groups[number].offers)
            else before
            for number, before in enumerate(choices)
        )
        if other != choices:
            yield other


@dataclass(frozen=True)
class GroupChoice:
    """The candidate chosen for a group of tables.

    Attributes:
        tables: table names.
        pooled: whether the tables belong to an EmbeddingBagCollection.
        offer: the chosen candidate; None for TorchRec's planner.
        others: other candidates and the step time with each in seconds, shortest first.
        refused: candidates that cannot be used, with the reason.
    """

    tables: tuple[str, ...]
    pooled: bool
    offer: choosing.Candidate | None
    others: tuple[tuple[choosing.Candidate | None, float], ...]
    refused: tuple[tuple[choosing.Candidate, str], ...]


@dataclass(frozen=True)
class Chosen(choosing.Choice):
    """Result of sharding ``auto``, with a report.

    Attributes:
        groups: the chosen candidate of each group of tables.
        others: names of tables in other entries of the ``sharding`` section.
        seconds: predicted step time in seconds, without dense layers.
        planner: ``seconds`` with TorchRec's planner for all tables; None if it finds no plan.
        num_trials: number of evaluated plans.
        measured: whether costs were measured. Otherwise the report shows no milliseconds.
    """

    name: ClassVar[str] = "auto"

    groups: tuple[GroupChoice, ...]
    others: tuple[str, ...]
    seconds: float
    planner: float | None
    num_trials: int
    measured: bool = True

    def __str__(self) -> str:
        chosen: dict[str, list[str]] = {}
        for each in self.groups:
            chosen.setdefault(str(each.offer or _PLANNER), []).extend(each.tables)
        words = ", ".join(f"{offer} for {_named(names)}" for offer, names in chosen.items())
        return f"auto chose {words}" + (f". {self._predicted()}" if self.measured else "")

    def lines(self) -> str:
        """Return YAML of a ``sharding`` section with the same choices, to use without ``auto``."""
        every = [*self.others, *(name for each in self.groups for name in each.tables)]
        lines = [
            entry_line(offer, patterns_of(names, [n for n in every if n not in set(names)]))
            for offer, names in self.offered
        ]
        if not self.others:
            return "\n".join(["sharding:", *lines]) if lines else "sharding: []"
        instead = "replace the auto entry by" if lines else "remove the auto entry"
        return "\n".join([f"# sharding: {instead}", *lines])

    def as_json(self) -> Any:
        """Return the report as JSON values."""
        return {
            "milliseconds": 1000 * self.seconds,
            "milliseconds_of_the_planner": self.planner and 1000 * self.planner,
            "measured": self.measured,
            "groups": [
                {
                    "tables": list(each.tables),
                    "pooled": each.pooled,
                    "chosen": _json(each.offer),
                    "others": [
                        {"chosen": _json(offer), "milliseconds": 1000 * seconds}
                        for offer, seconds in each.others
                    ],
                    "refused": [{**offer.as_json(), "why": why} for offer, why in each.refused],
                }
                for each in self.groups
            ],
            "plans_tried": self.num_trials,
            "registry": self.lines(),
        }

    def shown(self, run: str) -> Sequence[RenderableType]:
        """Return the report for a terminal."""
        from rich.text import Text

        return [
            self._table(run),
            Text("\n".join(self._words())),
            Text(f"To use these choices without auto:\n{self.lines()}"),
        ]

    def _table(self, run: str) -> TextTable:
        from recd_plugins.api import text_table

        variant = "" if run == self.name else run
        title = f"{variant} auto: choice for each group of similar tables".strip()
        others = "other choices: ms per step" if self.measured else "other choices, best first"
        table = text_table(title, ["tables", "chosen", others])
        for each in self.groups:
            seconds = [f": {1000 * s:.1f}" * self.measured for _, s in each.others]
            table.add_row(
                _named(each.tables) + ("" if each.pooled else ", sequences"),
                str(each.offer or _PLANNER),
                "\n".join(
                    f"{offer or _PLANNER}{ms}"
                    for (offer, _), ms in zip(each.others, seconds, strict=True)
                ),
            )
        return table

    def _words(self) -> Iterator[str]:
        tried = f"{self.num_trials} plans were compared"
        if self.measured:
            yield f"{self._predicted()} ({tried})"
        else:
            yield f"{tried} with costs assumed from bandwidths. recd calibrate measures the costs."
        for each in self.groups:
            for offer, why in each.refused:
                yield f"{offer} cannot be used for {_named(each.tables)}: {why}"

    def _predicted(self) -> str:
        beside = "no plan fits" if self.planner is None else f"{1000 * self.planner:.1f} ms"
        return (
            f"Predicted step without dense layers: {1000 * self.seconds:.1f} ms; with "
            f"TorchRec's planner for all tables: {beside}"
        )


def _chosen(
    evaluations: Evaluations,
    groups: Sequence[Group],
    best: Choices,
    question: choosing.SearchContext,
) -> Chosen:
    found, start = evaluations(best), evaluations((None,) * len(groups))
    made = evaluations.made
    choices = []
    for number, (group, offer) in enumerate(zip(groups, best, strict=True)):
        tried = [(other[number], each) for other, each in made.items() if other[number] != offer]
        # The dict keeps the last value per candidate, which is its shortest step.
        longest_first = sorted(tried, key=lambda each: -each[1].total)
        possible = {o: each.total for o, each in longest_first if each.seconds is not None}
        refused = {o: each.why for o, each in tried if o and each.error and o not in possible}
        others = sorted(possible.items(), key=lambda each: each[1])
        choices.append(
            GroupChoice(group.names, group.pooled, offer, tuple(others), tuple(refused.items()))
        )
    return Chosen(
        _offered((each.tables, each.offer) for each in choices),
        tuple(choices),
        tuple(question.others),
        found.total,
        None if start.seconds is None else start.total,
        len(made),
        measured=question.context.measured,
    )


def patterns_of(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return glob patterns that match ``names`` but not ``others``, such as ``t_user_*``."""
    found: list[str] = []
    for name in names:
        if not any(fnmatchcase(name, pattern) for pattern in found):
            found.append(_pattern(name, names, others))
    return found


def _pattern(name: str, names: Sequence[str], others: Collection[str]) -> str:
    for end, letter in enumerate(name[:-1], start=1):
        prefix = name[:end]
        if letter != "_" or any(other.startswith(prefix) for other in others):
            continue
        if sum(each.startswith(prefix) for each in names) > 1:
            return f"{escape(prefix)}*"
    return escape(name)


def entry_line(offer: choosing.Candidate, patterns: Sequence[str]) -> str:
    """Return a YAML entry of the ``sharding`` section for a candidate and table patterns."""
    options = f", options: {offer.written}" if offer.options else ""
    tables = json.dumps(list(patterns), ensure_ascii=False)  # YAML has no surrogate pairs
    return f"  - {{use: {offer.use}, tables: {tables}{options}}}"


def _named(tables: Sequence[str]) -> str:
    return tables[0] if len(tables) == 1 else f"{tables[0]} ... {tables[-1]} ({len(tables)})"


def _json(offer: choosing.Candidate | None) -> dict[str, Any] | None:
    return None if offer is None else offer.as_json()
