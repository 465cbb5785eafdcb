"""Finds hot samples (samples that look up only cached rows), and groups them into batches.

Hot batches are spread evenly over a window of consecutive steps. All ranks assign them to steps in
the same order, so that as many steps as possible have hot batches on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import Lookups, Rows

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class HotTable:
    """A cached table: its features, and the row numbers of cached rows, int64 in any order."""

    features: tuple[str, ...]
    num_embeddings: int
    rows: NDArray[np.int64]


class HotRows:
    """Finds samples that look up only cached rows in ``tables``. Ignores other tables."""

    def __init__(self, tables: Mapping[str, HotTable], lookups: Lookups) -> None:
        self._lookups = lookups
        self._features: dict[str, list[tuple[NDArray[np.uint8], int]]] = {}
        content = hashlib.sha256()
        for name, table in tables.items():
            hot = np.zeros(table.num_embeddings, np.bool_)
            hot[table.rows] = True
            bits = np.packbits(hot, bitorder="little")
            content.update(f"{name} {table.features} {table.num_embeddings} ".encode())
            content.update(bits.tobytes())
            for feature in table.features:
                self._features.setdefault(feature, []).append((bits, table.num_embeddings))
        self.digest = content.hexdigest()[:16]

    def samples(self, rows: Rows) -> NDArray[np.bool_]:
        """Return whether each row of data looks up only cached rows, bool ``[num_rows]``."""
        hot = np.ones(len(rows), np.bool_)
        for feature, found in self._lookups.of(rows, list(self._features)).items():
            for bits, num_embeddings in self._features[feature]:
                lists = _all_hot(found.ids, found.offsets, bits, np.uint64(num_embeddings))
                hot &= lists if found.inverse is None else lists[found.inverse]
        return hot


@numba.njit(cache=True, nogil=True)
def _all_hot(ids: Any, offsets: Any, bits: Any, num_embeddings: Any) -> Any:
    """Return for each list of ids whether all its rows are cached, as marked in ``bits``."""
    hot = np.ones(len(offsets) - 1, np.bool_)
    for row in range(len(hot)):
        for at in range(offsets[row], offsets[row + 1]):
            id_ = np.uint64(ids[at])
            if id_ >= num_embeddings or not (bits[id_ >> np.uint64(3)] >> (id_ & np.uint64(7))) & 1:
                hot[row] = False
                break
    return hot


def sort_rows(hot: NDArray[np.bool_], batch_size: int) -> list[NDArray[np.int64]]:
    """Split rows of data into hot batches, normal batches, and at most one mixed batch.

    Args:
        hot: whether each row of data looks up only cached rows, bool ``[num_rows]``.
        batch_size: rows per batch. Must divide ``num_rows``.

    Returns:
        The row indices of each batch, ascending, int64 ``[batch_size]``.
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
    parts = zip(hot_parts, normal_parts, strict=True)
    return [np.sort(np.concatenate(part)) for part in parts]


def whole_sessions(hot: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each row whether ``hot`` is True for all rows of its session, ``[num_rows]``.

    ``starts`` are the indices of the first row of each session.
    """
    return np.repeat(np.logical_and.reduceat(hot, starts), np.diff(starts, append=len(hot)))


def evenly_spread(num_places: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to ``num_places - 1`` whose prefixes are all evenly spread.

    Uses the ranks of multiples of the golden ratio modulo 1.
    """
    points = np.arange(1, num_places + 1) * _GOLDEN % 1
    return np.argsort(np.argsort(points))
