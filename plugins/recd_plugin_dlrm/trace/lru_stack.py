"""The arrays of an LRU stack, which stay as large as the ids in it need."""

from __future__ import annotations

import numpy as np

from recd_plugin_dlrm.trace import kernels

# Positions of a new stack; a power of two, as always.
_LEAST = 1 << 12
_MOST_IDS = 1 << 29


class LruStack:
    """Codes of ids by how recently they were accessed, as ``kernels`` use it.

    Positions that were used are freed when all are used up, so that a stack of m ids has 2m to 4m
    positions of 8 bytes each, and for a moment twice that, however long a trace is.

    Attributes:
        tree, at, last: int32; see ``kernels``.
        state: int64 ``[4]``: positions used and ids in the stack, and two more for the generator.
    """

    def __init__(self) -> None:
        self.tree = np.zeros(_LEAST + 1, np.int32)
        self.at = np.full(_LEAST + 1, -1, np.int32)
        self.last = np.zeros(0, np.int32)
        self.state = np.zeros(4, np.int64)

    def make_room(self) -> None:
        """Free positions where all are used up."""
        used, live = int(self.state[0]), int(self.state[1])
        if used < len(self.at) - 1:
            return
        if live > _MOST_IDS:
            raise MemoryError(f"an LRU stack holds at most {_MOST_IDS:,} ids")
        size = max(_LEAST, 1 << (2 * live - 1).bit_length())
        tree, at = np.zeros(size + 1, np.int32), np.full(size + 1, -1, np.int32)
        self.state[0] = kernels.compact(self.at, used, self.last, tree, at)
        self.tree, self.at = tree, at

    def know(self, num_ids: int) -> None:
        """Have a place in ``last`` for so many ids."""
        if num_ids > len(self.last):
            self.last = grown(self.last, num_ids)


def grown(array: np.ndarray, size: int) -> np.ndarray:
    """The same values with room for ``size`` at least, zeros behind them."""
    larger = np.zeros(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger
