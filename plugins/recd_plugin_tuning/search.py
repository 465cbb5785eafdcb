"""Choices, one group or all groups of a kind after the other, until none gets better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recd_plugin_tuning.groups import Group
from recd_plugin_tuning.trials import Choices, Evaluations

#: A choice that saves a smaller share of the step is within what predictions are off by.
LEAST_GAIN = 0.03
# Likewise, for tables that are pooled: on shaped links, to coalesce them was predicted to save more
# than 6 % of a step, and took 13 to 17 % more.
_LEAST_GAIN_POOLED = 0.1
# So much more may a choice seem to take, of a sample of the data, that is tried with all of it.
_NEAR, _AT_ONCE = 0.15, 2
# Of what it costs, a group that was chosen for with all of its kind hardly saves more alone.
_SAVED_ALONE = 0.5


def best_choices(trials: Evaluations, groups: Sequence[Group]) -> Choices:
    """The choices that no change of one group, or of all groups of a kind, makes better.

    It starts with all tables left to the planner, and compares trials in haste. What is found, and
    what comes near to it, is tried again as training plans it, until nothing is left to try. Each
    time it starts anew: what seemed to save enough in haste has to save it still.
    """
    start: Choices = (None,) * len(groups)
    if not any(group.offers for group in groups):
        trials.settle(start)
        return start
    while True:
        best = _search(trials, groups, start)
        if all(trials.settle(each) for each in (best, *_near(trials, best))):
            return best


def _near(trials: Evaluations, best: Choices) -> list[Choices]:
    most = trials(best).total * (1 + _NEAR)
    others = [each for each, trial in trials.made.items() if each != best and trial.total < most]
    return sorted(others, key=lambda each: trials.made[each].total)[:_AT_ONCE]


def _search(trials: Evaluations, groups: Sequence[Group], best: Choices) -> Choices:
    while True:
        before = best
        of_kind: list[Choices] = []
        for move in _kinds(groups):
            for other in _changed(best, groups, move):
                of_kind.append(other)
                best = _better(trials, groups, other, best)
        for number in range(len(groups)):
            if not _matters(trials, groups, best, number):
                continue
            for other in _changed(best, groups, (number,)):
                if _may_be_better(trials, other, best, of_kind):
                    best = _better(trials, groups, other, best)
        if best == before:
            return best


def _better(
    trials: Evaluations, groups: Sequence[Group], choices: Choices, best: Choices
) -> Choices:
    """The choices, where they save enough over the best so far: simpler ones come first."""
    least = max(
        _least_gain(group) for group, a, b in zip(groups, choices, best, strict=True) if a != b
    )
    return choices if trials(choices).total < trials(best).total * (1 - least) else best


def _least_gain(group: Group) -> float:
    return _LEAST_GAIN_POOLED if group.pooled else LEAST_GAIN


def _kinds(groups: Sequence[Group]) -> Iterator[tuple[int, ...]]:
    """Numbers of groups that are looked up alike."""
    for pooled in (False, True):
        kind = tuple(number for number, group in enumerate(groups) if group.pooled == pooled)
        if kind:
            yield kind


def _matters(trials: Evaluations, groups: Sequence[Group], best: Choices, number: int) -> bool:
    """Whether another choice for one group may save enough."""
    whole = trials(best).total
    if whole == float("inf"):
        return True
    alone = whole - trials.seconds_without(best, (number,))
    return alone * _SAVED_ALONE > whole * _least_gain(groups[number])


def _may_be_better(
    trials: Evaluations, choices: Choices, best: Choices, tried: Sequence[Choices]
) -> bool:
    """Whether choices may be, as far as those tell that differ from them in few groups.

    These would be as good if the groups in which they differ cost nothing.
    """
    for other in tried:
        differing = [n for n, (a, b) in enumerate(zip(choices, other, strict=True)) if a != b]
        if trials(other).seconds is None:
            continue
        least = trials.seconds_without(other, differing)
        if least > trials(best).total * (1 - LEAST_GAIN):
            return False
    return True


def _changed(
    choices: Choices, groups: Sequence[Group], numbers: Sequence[int]
) -> Iterator[Choices]:
    """The choices with one offer for all of some groups, as far as it is offered for each."""
    offered = {offer.key: offer for number in numbers for offer in groups[number].offers}
    for offer in (None, *offered.values()):
        other = tuple(
            offer
            if number in numbers and (offer is None or offer in groups[number].offers)
            else before
            for number, before in enumerate(choices)
        )
        if other != choices:
            yield other
