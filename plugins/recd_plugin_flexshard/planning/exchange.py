"""How many ids ranks want of each other, as sums by rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Exchange:
    """An all-to-all of ids, and of the embeddings that come back for them.

    Arrays are int64 ``[steps, world_size]``. ``..._out`` are what a rank wants, of itself too;
    ``..._in`` what is wanted of it; scalars are those of the embeddings.

    Args:
        steps: batches.
        world_size: ranks.
        group_size: consecutive ranks that exchange with each other.
    """

    def __init__(self, steps: int, world_size: int, group_size: int) -> None:
        self._group_size = group_size
        self.ids_out, self.ids_in, self._ids_own = _zeros(steps, world_size)
        self.scalars_out, self.scalars_in, self._scalars_own = _zeros(steps, world_size)

    def add(self, step: int, rank: int, wanted: NDArray[np.int64], dim: int) -> None:
        """A rank wants so many embeddings of each rank of its group, ``[group_size]``."""
        first = rank - rank % self._group_size
        group = slice(first, first + self._group_size)
        own = wanted[rank - first]
        total = wanted.sum()
        self.ids_out[step, rank] += total
        self.ids_in[step, group] += wanted
        self._ids_own[step, rank] += own
        self.scalars_out[step, rank] += total * dim
        self.scalars_in[step, group] += wanted * dim
        self._scalars_own[step, rank] += own * dim

    @property
    def ids_sent(self) -> NDArray[np.int64]:
        """Ids sent to other ranks."""
        return self.ids_out - self._ids_own

    @property
    def ids_received(self) -> NDArray[np.int64]:
        """Ids received from other ranks."""
        return self.ids_in - self._ids_own

    @property
    def scalars_received(self) -> NDArray[np.int64]:
        """Scalars received from other ranks, forward; as many go back to them as gradients."""
        return self.scalars_out - self._scalars_own

    @property
    def scalars_sent(self) -> NDArray[np.int64]:
        """Scalars sent to other ranks, forward; gradients of as many come back."""
        return self.scalars_in - self._scalars_own


def _zeros(steps: int, world_size: int) -> list[NDArray[np.int64]]:
    return [np.zeros((steps, world_size), np.int64) for _ in range(3)]
