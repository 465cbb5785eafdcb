"""Choices, one group or all groups of a kind after the other, until none gets better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recd_plugins.planning.auto.groups import Group
from recd_plugins.planning.auto.trials import Choices, Trials

#: A choice that saves a smaller share of the step is within what predictions are off by.
LEAST_GAIN = 0.03


def best_choices(trials: Trials, groups: Sequence[Group]) -> Choices:
    """The choices that no change of one group, or of all groups of a kind, makes better.

    It starts with all tables left to the planner.
    """
    best: Choices = (None,) * len(groups)
    while True:
        before = best
        for move in _moves(groups):
            for other in changed(best, groups, move):
                if trials(other).total < trials(best).total * (1 - LEAST_GAIN):
                    best = other
        if best == before:
            return best


def _moves(groups: Sequence[Group]) -> Iterator[tuple[int, ...]]:
    """Numbers of groups that change together: kinds first."""
    kinds = [
        tuple(number for number, group in enumerate(groups) if group.pooled == pooled)
        for pooled in (False, True)
    ]
    alone = [(number,) for number in range(len(groups))]
    yield from dict.fromkeys(move for move in (*kinds, *alone) if move)


def changed(choices: Choices, groups: Sequence[Group], numbers: Sequence[int]) -> Iterator[Choices]:
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
