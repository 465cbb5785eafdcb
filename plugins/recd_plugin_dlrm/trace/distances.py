"""Algorithm 1: from a trace its ids in the order of first use and its LRU stack distances."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recd_plugin_dlrm.trace import kernels
from recd_plugin_dlrm.trace.lru_stack import LruStack, grown
from recd_plugin_dlrm.trace.table_trace import TableTrace

# Accesses between two looks at whether there is room for new ids.
_PIECE = 1 << 16


class StackDistances:
    """Profiles a trace piece by piece, in O(log m) an access for m distinct ids.

    Holds about 100 bytes a distinct id, whatever the length of the trace.

    Attributes:
        accesses: seen so far.
    """

    def __init__(self) -> None:
        self.accesses = 0
        self._stack = LruStack()
        self._keys = np.zeros(2 * _PIECE, np.int64)
        self._codes = np.full(2 * _PIECE, -1, np.int32)
        self._unique = np.zeros(_PIECE, np.int64)
        self._num_ids = 0
        self._counts = np.zeros(_PIECE + 1, np.int64)

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distances of the next accesses.

        Args:
            ids: int64 ``[n]``.

        Returns:
            int64 ``[n]``: 0 for an id that is new, else its depth in the LRU stack, from 1.
        """
        out = np.empty(len(ids), np.int64)
        for first in range(0, len(ids), _PIECE):
            self._add(ids[first : first + _PIECE], out[first : first + _PIECE])
        self.accesses += len(ids)
        return out

    def trace(self, feature: str, rows: int | None = None) -> TableTrace:
        """What was seen so far.

        Args:
            feature: whose ids these are.
            rows: of data that had them; as many as accesses without it.
        """
        distances = np.flatnonzero(self._counts)
        return TableTrace(
            feature=feature,
            ids=self._unique[: self._num_ids].copy(),
            distances=distances,
            counts=self._counts[distances],
            rows=self.accesses if rows is None else rows,
        )

    def _add(self, ids: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        most = self._num_ids + len(ids)
        if 2 * most > len(self._keys):
            self._grow_table(most)
        if most > len(self._unique):
            self._unique = grown(self._unique, most)
        codes = np.empty(len(ids), np.int32)
        self._num_ids = kernels.code_ids(
            ids, self._keys, self._codes, self._unique, self._num_ids, codes
        )
        if self._num_ids >= len(self._counts):
            self._counts = grown(self._counts, self._num_ids + 1)
        stack, done = self._stack, 0
        stack.know(self._num_ids)
        while done < len(codes):
            stack.make_room()
            done += kernels.stack_distances(
                codes[done:],
                out[done:],
                self._counts,
                stack.tree,
                stack.at,
                stack.last,
                stack.state,
            )

    def _grow_table(self, num_ids: int) -> None:
        size = 1 << (2 * num_ids).bit_length()
        self._keys, self._codes = np.zeros(size, np.int64), np.full(size, -1, np.int32)
        kernels.insert_ids(self._unique, self._num_ids, self._keys, self._codes)


def profile_ids(ids: NDArray[np.int64], feature: str = "id") -> TableTrace:
    """The profile of a whole trace, int64 ``[n]``."""
    distances = StackDistances()
    distances.add(np.ascontiguousarray(ids, np.int64))
    return distances.trace(feature)
