"""TorchRec ``CacheStatistics`` of a cached table, for TorchRec's planner."""

from __future__ import annotations

from typing import Any

import numpy as np
from torchrec.distributed.types import CacheStatistics

from recd_plugin_scars.planning.load import BatchRows, TableLoad


class AccessStatistics(CacheStatistics):
    """TorchRec ``CacheStatistics`` of a cache that keeps the most read rows of a table."""

    def __init__(self, load: TableLoad, batch_size: int) -> None:
        self._rows = BatchRows(load, batch_size)

    @property
    def expected_lookups(self) -> float:
        """Return the expected number of distinct rows per step over all ranks."""
        return self._rows.unique

    def expected_miss_rate(self, clf: float) -> float:
        """Return the fraction of distinct rows that miss a cache with load factor ``clf``."""
        if not 0 < clf < 1:
            return float(clf <= 0)
        rows = self._rows
        return rows.cold(round(clf * rows.load.num_embeddings)) / rows.unique

    @property
    def cacheability(self) -> float:
        """Return the area under the miss rate curve: 0 is easy to cache, 1 is hard to cache."""
        rows = self._rows
        ends = rows.load.segments.ends
        # Within a segment the miss rate falls linearly.
        return float(np.trapezoid(rows.left / rows.unique, ends / ends[-1]))

    def __deepcopy__(self, memo: dict[int, Any]) -> AccessStatistics:
        """Return this object, because it is immutable and TorchRec's planner copies it often."""
        return self
