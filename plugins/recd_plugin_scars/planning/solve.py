"""The least value of a function that falls and rises, in few evaluations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


def least(function: Callable[[int], float], last: int) -> int:
    """Where ``function`` is least, of 0 to ``last``; of equal ones the first.

    What a sample costs (SCARS, section II) mostly falls and then rises with the rows that are
    cached, and a binary search finds the least. But it can rise first: few cached rows make
    the batch smaller and save little, and only many of them pay. So the search looks at the ends
    and at some places between them, close together near the ends, and then by halves around each
    that no neighbour is below: O(log last) evaluations.
    """
    function = cache(function)
    parts = max(1, last.bit_length())
    near_an_end = [min(last, 1 << power) for power in range(parts)]
    evenly = [last * part // parts for part in range(parts + 1)]
    places = sorted({*near_an_end, *(last - place for place in near_an_end), *evenly})
    values = [function(place) for place in places]
    found = set(places)
    for index, value in enumerate(values):
        before, after = max(index - 1, 0), min(index + 1, len(places) - 1)
        if value <= values[before] and value <= values[after]:
            found.add(_by_halves(function, places[before], places[after]))
    return min(found, key=lambda place: (function(place), place))


def _by_halves(function: Callable[[int], float], low: int, high: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if function(middle + 1) < function(middle):
            low = middle + 1
        else:
            high = middle
    return low
