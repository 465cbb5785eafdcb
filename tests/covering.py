"""Pairwise samples of test matrices, and tests by day."""

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
    """Return whether everything runs, as with ``make test-nightly``."""
    return settings.get_current_profile_name() == "nightly"


def of_today(some: Sequence[T], turns: int, first_day: int = 0) -> Sequence[T]:
    """Return all by night, by day every ``turns``-th of them, in turn by ``RECD_DAY``."""
    day = os.environ["RECD_DAY"]
    return some if by_night() or day == "all" else some[(int(day) + first_day) % turns :: turns]


def cells_of_today(cells: Sequence[C], together: int = 2) -> list[C]:
    """Return all cells by night, by day those of a full matrix that cover all pairs.

    Pairs show 70 to 97 % of faults (Kuhn, Wallace and Gallo, IEEE TSE 2004).

    Args:
        cells: values of every axis.
        together: number of values that meet by day.
    """
    full = prod(len(set(axis)) for axis in zip(*cells, strict=True)) == len(cells)
    if not full or len(cells[0]) <= together or by_night():
        return list(cells)
    return covering(cells, together)


def covering(cells: Sequence[C], together: int) -> list[C]:
    """Return a greedy cover of all combinations of ``together`` values."""
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
        # The first of equals, so that runs are alike.
        best = max(met, key=lambda index: (len(met[index] & left), -index))
        left -= met.pop(best)
        chosen.append(best)
    return [cells[index] for index in sorted(chosen)]
