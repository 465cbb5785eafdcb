"""How often the rows of a table are accessed, as the cost model takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import log_unread
from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api.access import TableAccess
    from recd_plugins.api.planning import DistinctIds


# Of a range of rows; they end within a thousandth.
_BISECTIONS = 16


@dataclass(frozen=True, eq=False)
class TableDemand:
    """A table and the accesses of its rows.

    - ``probabilities``: float64, mean accesses of a row by one sample, non-increasing; above 1
      where a sample accesses a row several times.
    - ``repeats``: int64, how many rows each probability is of; None: of one each. A distribution of
      many rows is so given in few bins.
    - ``rows``: int64, the rows in order of ``probabilities``; None: row 0 is accessed most, then 1,
      and so on.
    - ``tail_rows``: how many rows are in none of these; ``tail_probability``: of each of them.
    - ``dedupe_factor``: rows of a batch over its distinct rows, where these alone are looked up.
    - ``features``: how many features are looked up in the table.
    - ``distinct``: distinct ids of a batch, by its size, as they were counted; None: as many as
      independent accesses have.

    Raises ``DataError`` where these do not fit together.
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
    _known: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = len(self.probabilities) if self.repeats is None else int(self.repeats.sum())
        object.__setattr__(self, "_known", known)
        for wrong in self._problems():
            raise DataError(f"table {self.name}: {wrong}")

    def _problems(self) -> list[str]:
        p = self.probabilities
        found = []
        if self._known + self.tail_rows != self.num_embeddings:
            found.append(
                f"{self._known} known rows and {self.tail_rows} others are not its "
                f"{self.num_embeddings}"
            )
        if self.embedding_dim < 1 or self.features < 1 or not self.dedupe_factor >= 1:
            found.append("embedding_dim, features and dedupe_factor are at least 1")
        if self.rows is not None and (self.repeats is not None or len(self.rows) != len(p)):
            found.append("rows name one row for each probability, without repeats")
        if self.repeats is not None and (len(self.repeats) != len(p) or (self.repeats < 0).any()):
            found.append("repeats has a number of rows, 0 or more, for each probability")
        if not self.tail_probability >= 0 or self.tail_rows < 0:
            found.append("tail_rows and tail_probability are at least 0")
        last = float(p[-1]) if len(p) else np.inf
        if not bool((p[1:] <= p[:-1]).all()) or not last >= self.tail_probability * bool(
            self.tail_rows
        ):
            found.append("probabilities do not increase, and the tail's is not above the last")
        return found

    @classmethod
    def from_access(
        cls, access: TableAccess, embedding_dim: int, dedupe_factor: float = 1.0
    ) -> TableDemand:
        """The demand that an access profile tells.

        Known rows that are accessed less often than the mean of those that are not known cannot be
        told apart from these, and are counted among them.
        """
        probabilities = access.probabilities()
        kept = len(probabilities)
        if access.tail_rows:
            kept = int((probabilities >= access.tail_probability).sum())
        tail_rows = access.tail_rows + len(probabilities) - kept
        tail = access.tail_rows * access.tail_probability + float(probabilities[kept:].sum())
        # The mean of values that are none above the last one kept, but for rounding.
        highest = float(probabilities[kept - 1]) if kept else np.inf
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

    def accesses(self, rows: int) -> float:
        """Mean accesses by one sample to the first ``rows`` rows."""
        known = min(rows, self._known)
        tail = (rows - known) * self.tail_probability
        if self.repeats is None:
            return float(self.probabilities[:known].sum()) + tail
        before = np.cumsum(self.repeats) - self.repeats
        counted = np.clip(known - before, 0, self.repeats)
        return float(self.probabilities @ counted) + tail

    @cached_property
    def length(self) -> float:
        """L: mean accesses by one sample, to all rows."""
        return self.accesses(self.num_embeddings)

    def independent_rows(self, batch_size: int) -> float:
        """Rows of a batch that would have its distinct ids if their accesses were independent.

        Rows of a session read the same ids, so fewer than ``batch_size``; as many where no distinct
        ids were counted, or no fewer than independent accesses have.
        """
        counted = self.distinct.of(batch_size) if self.distinct is not None else 0.0
        if counted <= 0:
            return float(batch_size)
        unread = log_unread(np.append(self.probabilities, self.tail_probability))
        repeats = np.ones(len(unread)) if self.repeats is None else np.append(self.repeats, 0)
        repeats[-1] = self.tail_rows
        # One distinct row is the least that a batch has.
        low, high = (log(min(batch_size, rows)) for rows in (self.dedupe_factor, batch_size))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            distinct = -float(np.expm1(unread * (exp(middle) / self.dedupe_factor)) @ repeats)
            low, high = (low, middle) if distinct > counted else (middle, high)
        return exp(high)

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows of ranks ``start`` to ``stop``, most accessed first; of the tail by number."""
        if self.rows is None:
            return np.arange(start, stop, dtype=np.int64)
        known = self.rows[start:stop]
        if stop <= self._known:
            return known
        others = np.ones(self.num_embeddings, dtype=np.bool_)
        others[self.rows] = False
        tail = np.flatnonzero(others)[max(start - self._known, 0) : stop - self._known]
        return np.concatenate([known, tail.astype(np.int64)])
