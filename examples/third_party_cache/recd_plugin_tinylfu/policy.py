"""TinyLFU (arXiv 1512.00727): admits a row only if it is read more often than the evicted row."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.api import RowPolicy, ShardRows, Slots

_FACTORS = np.array([[0x9E3779B1], [0x85EBCA6B], [0xC2B2AE35], [0x27D4EB2F]])
_CELLS_PER_ROW = 8


class TinyLfu(RowPolicy):
    """Caches a new row only if it is read more often than the least recently used row.

    Args:
        rows: rows of this rank's shard of the table.
        sample: number of reads per cached row after which all read counts are halved.
    """

    name: ClassVar[str] = "tiny_lfu"

    def __init__(self, rows: ShardRows, sample: int = 10) -> None:
        super().__init__(rows)
        self._sample, self._num_reads = sample * rows.capacity, 0
        self._sketch = np.zeros((len(_FACTORS), _width(rows.capacity)), np.int32)
        # Maps each cached row to its slot, least recently used first.
        self._kept = dict(
            zip(rows.of_slots(rows.hot[::-1]).tolist(), rows.hot[::-1].tolist(), strict=True)
        )

    def release(self, used: Slots, unpinned: Slots) -> Slots:
        rows = self.rows.of_slots(used)
        self._count(rows)
        for row in rows.tolist():
            if row in self._kept:
                self._kept[row] = self._kept.pop(row)
        candidates = [
            (row, slot)
            for row, slot in zip(
                self.rows.of_slots(unpinned).tolist(), unpinned.tolist(), strict=True
            )
            if row not in self._kept
        ]
        leaves = [left for row, slot in candidates if (left := self._admit(row, slot)) is not None]
        slots = np.array(leaves, np.int32)
        # A row that another batch needs becomes a candidate again when that batch is done.
        return slots[~self.rows.pinned(slots)]

    def _admit(self, row: int, slot: int) -> int | None:
        """Return the slot to evict: the least recently used row's, the new row's, or None."""
        if len(self._kept) < self.rows.capacity:
            self._kept[row] = slot
            return None
        victim = next(iter(self._kept), None)
        if victim is None or self._reads(row) <= self._reads(victim):
            self.counts["rejected"] += 1
            return slot
        self.counts["admitted"] += 1
        left = self._kept.pop(victim)
        self._kept[row] = slot
        return left

    def _cells(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return ((rows * _FACTORS) >> 15) % self._sketch.shape[1]

    def _count(self, rows: NDArray[np.int64]) -> None:
        np.add.at(self._sketch, (np.arange(len(_FACTORS))[:, None], self._cells(rows)), 1)
        self._num_reads += len(rows)
        if self._num_reads > self._sample:
            self._sketch //= 2
            self._num_reads //= 2

    def _reads(self, row: int) -> int:
        cells = self._cells(np.array([row]))
        return int(np.take_along_axis(self._sketch, cells, axis=1).min())


def sketch_bytes(capacity: int) -> int:
    """Return the bytes of the read counters for a cache of ``capacity`` rows."""
    return 4 * len(_FACTORS) * _width(capacity)


def _width(capacity: int) -> int:
    return max(_CELLS_PER_ROW * capacity, 1)
