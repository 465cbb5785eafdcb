"""Which rows of a window go into which batch: hot ones together, normal ones together.

The hot batches of every rank stand at the first places of one sequence in which every first part is
spread evenly. So hot and normal batches alternate by their shares, and the places of a rank's hot
batches are among those of a rank that has more: as many steps as possible are hot on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class SortedBatch:
    """A batch of a window.

    Attributes:
        rows: int64 ``[batch_size]``, ascending: its rows by their numbers in the window.
        num_hot: how many of them are hot.
    """

    rows: NDArray[np.int64]
    num_hot: int


def sort_rows(hot: NDArray[np.bool_], batch_size: int) -> list[SortedBatch]:
    """The rows of a window in as many batches: hot, normal, and one with both where rows are left.

    Hot rows keep their order among each other, and normal ones too.

    Args:
        hot: bool ``[num_rows]``, of a whole number of batches.
        batch_size: rows of a batch.
    """
    hot_rows, normal_rows = np.flatnonzero(hot), np.flatnonzero(~hot)
    places = evenly_spread(len(hot) // batch_size)
    whole, left = divmod(len(hot_rows), batch_size)
    num_hot = np.zeros(len(places), np.int64)
    num_hot[places[:whole]] = batch_size
    if left:
        num_hot[places[whole]] = left
    hot_parts = np.split(hot_rows, np.cumsum(num_hot)[:-1])
    normal_parts = np.split(normal_rows, np.cumsum(batch_size - num_hot)[:-1])
    return [
        SortedBatch(np.sort(np.concatenate(parts)), len(parts[0]))
        for parts in zip(hot_parts, normal_parts, strict=True)
    ]


def whole_sessions(hot: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows are of sessions that are hot throughout.

    Args:
        hot: bool ``[num_rows]``: rows that are hot by themselves.
        starts: int64 ``[num_sessions]``, ascending: the first row of each session; the first is 0.
    """
    return np.repeat(np.logical_and.reduceat(hot, starts), np.diff(starts, append=len(hot)))


def evenly_spread(num_places: int) -> NDArray[np.int64]:
    """All of 0 to ``num_places - 1`` in an order in which each first part is spread evenly.

    Places by the rank of the multiples of the golden ratio modulo 1.
    """
    points = np.arange(1, num_places + 1) * _GOLDEN % 1
    return np.argsort(np.argsort(points))
