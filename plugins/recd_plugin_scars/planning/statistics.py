"""``CacheStatistics`` of a cached table for TorchRec's planner."""

from __future__ import annotations

from typing import Any

import numpy as np
from torchrec.distributed.types import CacheStatistics

from recd_plugin_scars.planning.load import BatchRows, TableLoad


class AccessStatistics(CacheStatistics):
    """``CacheStatistics`` of a static cache of the most read rows."""

    def __init__(self, load: TableLoad, batch_size: int) -> None:
        self._rows = BatchRows(load, batch_size)

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of the batch of all ranks."""
        return self._rows.unique

    def expected_miss_rate(self, clf: float) -> float:
        """Return the miss rate of distinct rows with the share ``clf`` of the table cached."""
        if not 0 < clf < 1:
            return float(clf <= 0)
        rows = self._rows
        return rows.cold(round(clf * rows.load.num_embeddings)) / rows.unique

    @property
    def cacheability(self) -> float:
        """The area below the curve of miss rates: 0 is easily cached, 1 hardly."""
        rows = self._rows
        ends = rows.load.segments.ends
        # Within a segment the rate falls evenly.
        return float(np.trapezoid(rows.left / rows.unique, ends / ends[-1]))

    def __deepcopy__(self, memo: dict[int, Any]) -> AccessStatistics:
        """Itself, as it never changes: TorchRec's planner copies its options for each proposal."""
        return self
