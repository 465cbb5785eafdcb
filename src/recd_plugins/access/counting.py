"""Counts how often each row of one table is read, in bounded memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recd_plugins.access.counts import Counts, Rows, add_counts, count_ids, keep_most_read
from recd_plugins.access.table_access import TableAccess

_PENDING_IDS = 1 << 16


class TableCounter:
    """Exact counts of up to ``bound`` distinct rows; beyond it Misra-Gries' sketch of so many.

    A sketch knows the rows that are read most. Their counts are too low, by ``error`` at most,
    which is what was really taken off them and never above ``total / (bound + 1)``. What it holds
    depends on the order of the ids, and on nothing else.

    Args:
        bound: distinct rows to keep; each takes 16 bytes, and up to four times as much for a moment
            while counts are added up.

    Attributes:
        total: ids that were added.
    """

    def __init__(self, bound: int) -> None:
        self.total = 0
        self._bound = bound
        self._rows: Rows = np.empty(0, np.int64)
        self._counts: Counts = np.empty(0, np.float64)
        self._error = 0.0
        self._pending: list[Rows] = []
        self._num_pending = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count ids, int64 ``[num_ids]``; they are copied."""
        self._pending.append(ids.copy())
        self._num_pending += len(ids)
        self.total += len(ids)
        # So that adding up costs a constant number of operations an id.
        if self._num_pending >= max(_PENDING_IDS, len(self._rows) // 2):
            self._add_up()

    def access(
        self, table: str, features: tuple[str, ...], num_embeddings: int, samples: int
    ) -> TableAccess:
        """What was counted, as the profile of a table of which ``samples`` were seen."""
        self._add_up()
        return TableAccess.from_counts(
            table,
            features,
            num_embeddings,
            samples=samples,
            rows=self._rows,
            accesses=self._counts,
            total=float(self.total),
            error=self._error,
        )

    def _add_up(self) -> None:
        if not self._pending:
            return
        rows, counts = count_ids(np.concatenate(self._pending))
        self._pending, self._num_pending = [], 0
        rows, counts = add_counts([self._rows, rows], [self._counts, counts])
        self._rows, self._counts, error = keep_most_read(rows, counts, self._bound)
        self._error += error
