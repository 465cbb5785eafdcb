"""What batches hold: samples a session, and the DedupeFactor that a converter would find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.analyze.session_counts import histogram, merge_histograms
from recd_plugins.api.columns import Deduplicator


@dataclass(frozen=True)
class BatchSummary:
    """What was found in batches.

    Attributes:
        batches: how many were looked at.
        rows: rows in all of them.
        samples_per_session: S, the mean rows of a session in a batch.
        histogram: by a power of two, sessions of a batch with at most so many rows in it and more
            than half of it, over all batches.
        dedupe_factors: by group of features, ids over ids in its unique rows.
    """

    batches: int
    rows: int
    samples_per_session: float
    histogram: dict[int, int]
    dedupe_factors: dict[tuple[str, ...], float]


class BatchMeter:
    """Takes rows in the order of reading. Holds one batch; what fills none at the end is left out.

    Args:
        groups: features that are deduplicated together.
        batch_size: rows of a batch; if there are fewer, all of them are one.
    """

    def __init__(self, groups: Sequence[tuple[str, ...]], batch_size: int) -> None:
        self._groups = list(groups)
        self._batch_size = batch_size
        self._deduplicate = Deduplicator()
        self._waiting: list[pa.RecordBatch] = []
        self._hashes: list[NDArray[np.uint64]] = []
        self._num_waiting = 0
        self._batches = self._rows = self._sessions = 0
        self._histogram: dict[int, int] = {}
        self._ids = np.zeros((2, len(self._groups)), np.int64)

    def add(self, batch: pa.RecordBatch, hashes: NDArray[np.uint64]) -> None:
        """Add rows, features as list<int64>, and the hashes of their sessions."""
        start = 0
        while start < len(hashes):
            taken = min(self._batch_size - self._num_waiting, len(hashes) - start)
            self._waiting.append(batch.slice(start, taken))
            self._hashes.append(hashes[start : start + taken])
            self._num_waiting += taken
            start += taken
            if self._num_waiting == self._batch_size:
                self._measure()

    def result(self) -> BatchSummary:
        """The summary of all batches so far."""
        if not self._batches and self._num_waiting:
            self._measure()
        all_ids, stored = self._ids.tolist()
        return BatchSummary(
            batches=self._batches,
            rows=self._rows,
            samples_per_session=self._rows / max(1, self._sessions),
            histogram=self._histogram,
            dedupe_factors={
                group: ids / unique if unique else 1.0
                for group, ids, unique in zip(self._groups, all_ids, stored, strict=True)
            },
        )

    def _measure(self) -> None:
        (batch,) = pa.Table.from_batches(self._waiting).combine_chunks().to_batches()
        sizes = np.unique(np.concatenate(self._hashes), return_counts=True)[1]
        self._waiting, self._hashes, self._num_waiting = [], [], 0
        columns = {
            name: (batch.column(name).values.to_numpy(), batch.column(name).offsets.to_numpy())
            for group in self._groups
            for name in group
        }
        groups = [[columns[name] for name in group] for group in self._groups]
        for index, unique in enumerate(self._deduplicate(groups, batch.num_rows)):
            self._ids[0, index] += sum(int(ends[-1] - ends[0]) for _, ends in groups[index])
            self._ids[1, index] += unique.values[0].size
        self._batches += 1
        self._rows += batch.num_rows
        self._sessions += len(sizes)
        self._histogram = merge_histograms([self._histogram, histogram(sizes)])
