"""Cells of a matrix in which every few of its values meet: most faults need no more."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from itertools import combinations
from math import prod
from typing import TypeVar

from hypothesis import settings

C = TypeVar("C", bound=Sequence[Hashable])
T = TypeVar("T")


def by_night() -> bool:
    """Whether all is to be run, however long it takes: with ``make test-nightly``."""
    return settings.get_current_profile_name() == "nightly"


def of_today(some: Sequence[T], turns: int, first_day: int = 0) -> Sequence[T]:
    """By night all; by day one of so many parts: every so many of them, the next day the next.

    ``RECD_DAY`` is the number of the day, or ``all``.
    """
    day = os.environ["RECD_DAY"]
    return some if by_night() or day == "all" else some[(int(day) + first_day) % turns :: turns]


def cells_of_today(cells: Sequence[C], together: int = 2) -> list[C]:
    """The cells to run: by night all; by day those of a full matrix in which any two values meet.

    (Kuhn, Wallace and Gallo, Software Fault Interactions and Implications for Software Testing,
    IEEE TSE 2004: two values together showed 70% to 97% of the faults of the systems that they
    looked at, three 90% or more. The others are what the night is for.)

    Args:
        cells: each a value of every axis.
        together: how many values meet by day.
    """
    full = prod(len(set(axis)) for axis in zip(*cells, strict=True)) == len(cells)
    if not full or len(cells[0]) <= together or by_night():
        return list(cells)
    return covering(cells, together)


def covering(cells: Sequence[C], together: int) -> list[C]:
    """The first cells that will do for any ``together`` values to meet that meet in all of them."""
    met = {
        index: {
            (axes, tuple(cell[axis] for axis in axes))
            for axes in combinations(range(len(cell)), together)
        }
        for index, cell in enumerate(cells)
    }
    left = set().union(*met.values())
    chosen = []
    while left:
        # The first of those that meet most that was not met, so that a run is like the last one.
        best = max(met, key=lambda index: (len(met[index] & left), -index))
        left -= met.pop(best)
        chosen.append(best)
    return [cells[index] for index in sorted(chosen)]
