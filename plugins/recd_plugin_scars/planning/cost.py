"""Rows that a batch reads, and bytes that are moved for them (SCARS, sections II to IV)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.planning.load import TableLoad

_BYTES_PER_SCALAR = 4


def seen(probabilities: NDArray[np.float64], lookups: float) -> NDArray[np.float64]:
    """u: how probably each row is among so many lookups: ``1 - (1 - P)^lookups`` (SCARS, eq. 2).

    Args:
        probabilities: float64 ``[rows]``, of one lookup to be of the row, 0 to 1.
        lookups: independent ones.
    """
    if not lookups:
        return np.zeros_like(probabilities)
    with np.errstate(divide="ignore"):
        result: NDArray[np.float64] = -np.expm1(lookups * np.log1p(-probabilities))
    return result


def expected_unique(probabilities: NDArray[np.float64], lookups: float) -> float:
    """Expected distinct rows among so many lookups, the sum of ``seen`` (SCARS, eq. 2)."""
    return float(seen(probabilities, lookups).sum())


def row_bytes(embedding_dim: int, optimizer: str) -> int:
    """Bytes of a row: float32 weights, and with row-wise Adagrad one float32 of state.

    Args:
        embedding_dim: scalars of the row.
        optimizer: ``sgd`` or ``rowwise_adagrad``.
    """
    return _BYTES_PER_SCALAR * (embedding_dim + (optimizer == "rowwise_adagrad"))


class BatchRows:
    """The rows of a table that a batch reads: expected numbers.

    Args:
        load: of the table.
        batch_size: samples of all ranks; that of one rank where each has its own rows moved.

    Attributes:
        lookups: of the batch.
        unique: distinct rows.
        left: float64 ``[segments + 1]``: those that are in none of the first so many segments.
    """

    def __init__(self, load: TableLoad, batch_size: float) -> None:
        self.load = load
        self.lookups = batch_size * load.lookups
        self._seen = seen(load.segments.probabilities, self.lookups)
        self.left = _from_rank(self._seen * load.segments.num_rows)
        self.unique = float(self.left[0])

    def cold(self, cached: int) -> float:
        """Distinct rows that are not among the ``cached`` most read: sum of u over the others."""
        return self._beyond(cached, self._seen, self.left)

    def missed(self, cached: int, held: float) -> float:
        """Distinct rows that are not cached, and that none of ``held`` batches before has read.

        Those batches hold their rows still, so that these need not be moved again: sum of
        ``u * (1 - u)^held``. Of a part of a batch, so large a part of its rows is held.
        """
        if not held:
            return self.cold(cached)
        if math.isinf(held):
            return 0.0
        whole = math.floor(held)
        missed = self._seen * (1 - self._seen) ** whole * (1 - (held - whole) * self._seen)
        return self._beyond(cached, missed, _from_rank(missed * self.load.segments.num_rows))

    def lru_batches(self, cached: int, held: float = 0) -> float:
        """How many batches ago a row was read last when it leaves an LRU cache, infinite if never.

        Che's approximation, for batches in place of single reads: the distinct rows of so many
        batches fill the cache (Che, Tung and Wang, Hierarchical Web caching systems, 2002).

        Args:
            cached: rows that it keeps.
            held: batches whose rows are there besides.
        """
        room = cached + self._rows_of(held)
        if room >= self.load.read_rows:
            return math.inf
        low, high = 0, 1
        while self._rows_of(high) <= room:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._rows_of(middle) <= room else (low, middle)
        filled = self._rows_of(low)
        # Of the batch that does not fit altogether, some rows are left.
        return low + (room - filled) / (self._rows_of(high) - filled)

    def _rows_of(self, batches: float) -> float:
        """Distinct rows of so many batches."""
        return float(seen(self._seen, batches) @ self.load.segments.num_rows)

    def _beyond(self, cached: int, each: NDArray[np.float64], left: NDArray[np.float64]) -> float:
        ends = self.load.segments.ends
        if cached >= ends[-1]:
            return 0.0
        segment = int(np.searchsorted(ends, cached, "right")) - 1
        part = float(ends[segment + 1] - cached) * float(each[segment])
        return float(left[segment + 1]) + part


def _from_rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[n + 1]``: sums of what is left from each place on; small ones are added first."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
