"""Where to cut a table into ranges of equal size, from a sample of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.cluster.keys import Cut, Keys

# 1000 rows of a sample in each of 64 ranges: their sizes come out within about 10 %.
_ROWS = 1 << 16
_STEP, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class Sample:
    """Rows chosen by a hash of their number: the same ones however the table comes in batches."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._below = np.uint64(2**64 - 1)
        self._chosen: list[pa.RecordBatch] = []

    def add(self, sessions: Any, times: Any) -> None:
        """The next rows of the table: two Arrow arrays."""
        numbers = np.arange(self.num_rows, self.num_rows + len(sessions))
        self.num_rows += len(sessions)
        batch = pa.record_batch([sessions, times, numbers], ["session", "time", "number"])
        self._chosen.append(self._those_chosen(batch))
        while sum(batch.num_rows for batch in self._chosen) > 2 * _ROWS:
            self._below //= np.uint64(2)
            table = pa.Table.from_batches(self._chosen).combine_chunks()
            self._chosen = [self._those_chosen(batch) for batch in table.to_batches()]

    def cuts(self, num_ranges: int) -> list[Cut]:
        """Where to cut into about ``num_ranges`` ranges of as many rows, in order.

        A cut lies between two sessions; within a session only where one fills a whole range.
        """
        if not self._chosen or num_ranges < 2:
            return []
        table = pa.Table.from_batches(self._chosen).combine_chunks()
        keys = Keys.of(table["session"], table["time"])
        order = keys.order()
        keys, numbers = keys.take(order), table["number"].to_numpy()[order]
        cuts = []
        before = None
        for row in np.unique(np.arange(1, num_ranges) * len(keys) // num_ranges):
            cut = keys.cut_before(row, int(numbers[row]))
            cuts.append(cut if cut.session == before else Cut(cut.session))
            before = cut.session
        return cuts

    def _those_chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        chosen = _mixed(batch.column("number").to_numpy()) <= self._below
        return batch if chosen.all() else batch.filter(pa.array(chosen))


def _mixed(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each number; splitmix64 without its last step."""
    mixed = (numbers.view(np.uint64) + np.uint64(1)) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
    hashed: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(27))
    return hashed * _STEP
