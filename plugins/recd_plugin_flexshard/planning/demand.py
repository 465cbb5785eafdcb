"""How often the rows of a table are accessed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import log_unread

if TYPE_CHECKING:
    from recd_plugins.api import DistinctIds, TableAccess


# Steps of a bisection over a range of rows; they end within a thousandth of it.
_BISECTIONS = 16


@dataclass(frozen=True, eq=False)
class TableDemand:
    """A table and the accesses of its rows.

    Attributes:
        name: of the table.
        num_embeddings: rows of the table.
        embedding_dim: scalars of a row.
        probabilities: float64, mean accesses of a row by one sample, non-increasing; above 1 where
            a sample accesses a row several times.
        rows: int64, the rows in the order of ``probabilities``; None: 0, 1, 2 and so on.
        repeats: int64, how many rows have each probability; None: one each.
        tail_rows: rows that are in none of these.
        tail_probability: accesses of each of them.
        dedupe_factor: rows of a batch over the distinct rows that are looked up.
        features: number of features that are looked up in the table.
        distinct: counted distinct ids of a batch, by its size; None: accesses are independent.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    probabilities: NDArray[np.float64]
    rows: NDArray[np.int64] | None = None
    repeats: NDArray[np.int64] | None = None
    tail_rows: int = 0
    tail_probability: float = 0.0
    dedupe_factor: float = 1.0
    features: int = 1
    distinct: DistinctIds | None = None

    @classmethod
    def from_access(
        cls, access: TableAccess, embedding_dim: int, dedupe_factor: float = 1.0
    ) -> TableDemand:
        """Return the demand of an access profile.

        Known rows that are accessed less than the mean of the unknown ones cannot be told apart
        from them, and join the tail.
        """
        probabilities = access.probabilities()
        kept = len(probabilities)
        if access.tail_rows:
            kept = int((probabilities >= access.tail_probability).sum())
        tail_rows = access.tail_rows + len(probabilities) - kept
        tail = access.tail_rows * access.tail_probability + float(probabilities[kept:].sum())
        highest = float(probabilities[kept - 1]) if kept else np.inf  # rounding apart
        return cls(
            name=access.table,
            num_embeddings=access.num_embeddings,
            embedding_dim=embedding_dim,
            probabilities=probabilities[:kept],
            rows=access.rows[:kept],
            tail_rows=tail_rows,
            tail_probability=min(tail / tail_rows, highest) if tail_rows else 0.0,
            dedupe_factor=dedupe_factor,
            features=len(access.features),
        )

    def bins(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the accesses of a row in each bin, non-increasing, and the rows of each bin."""
        repeats = self.repeats
        if repeats is None:
            repeats = np.ones(len(self.probabilities), dtype=np.int64)
        if not self.tail_rows:
            return self.probabilities, repeats
        return (
            np.append(self.probabilities, self.tail_probability),
            np.append(repeats, self.tail_rows),
        )

    def accesses(self, rows: int) -> float:
        """Return the mean accesses by one sample to the first ``rows`` rows."""
        probabilities, repeats = self.bins()
        before = np.cumsum(repeats) - repeats
        return float(probabilities @ np.clip(rows - before, 0, repeats))

    @cached_property
    def length(self) -> float:
        """L: mean accesses by one sample to all rows."""
        return self.accesses(self.num_embeddings)

    def independent_rows(self, batch_size: int) -> float:
        """Return the batch size at which independent accesses have the distinct ids of a batch.

        Below ``batch_size`` where rows of a session read the same ids.
        """
        counted = self.distinct.of(batch_size) if self.distinct is not None else 0.0
        if counted <= 0:
            return float(batch_size)
        probabilities, repeats = self.bins()
        unread = log_unread(probabilities)
        # One distinct row is the least that a batch has.
        low, high = (log(min(batch_size, rows)) for rows in (self.dedupe_factor, batch_size))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            distinct = -float(np.expm1(unread * (exp(middle) / self.dedupe_factor)) @ repeats)
            low, high = (low, middle) if distinct > counted else (middle, high)
        return exp(high)

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows of ranks ``start`` to ``stop``, most accessed first, then the tail."""
        if self.rows is None:
            return np.arange(start, stop, dtype=np.int64)
        known = len(self.rows)
        if stop <= known:
            return self.rows[start:stop]
        tail = np.setdiff1d(np.arange(self.num_embeddings), self.rows, assume_unique=True)
        return np.concatenate(
            [self.rows[start:stop], tail[max(start - known, 0) : stop - known]]
        ).astype(np.int64)
