"""Accumulators over the rows of a table: session sizes, batches, and a sample of whole sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugins.api import dedup

Hashes = NDArray[np.uint64]
Bools = NDArray[np.bool_]

_ALL = 1 << 64
#: Runs to buffer before grouping them by session, and batches to buffer before joining them.
_MAX_RUNS, _MAX_BATCHES = 1 << 18, 64


@dataclass(frozen=True)
class SessionSummary:
    """Session statistics of a table. A session counts once in each partition.

    Attributes:
        count: number of sessions.
        samples_per_session: S, the mean number of rows per session.
        median, longest: median and maximum number of rows per session.
        histogram: maps each power of two to the sessions with at most that many rows and more than
            half of it.
        torn: fraction of sessions whose rows are not adjacent.
    """

    count: int
    samples_per_session: float
    median: int
    longest: int
    histogram: dict[int, int]
    torn: float


class SessionCounts:
    """Counts the rows and runs of each session. Keeps one partition in memory."""

    def __init__(self) -> None:
        self._runs: list[pa.Table] = []
        self._num_runs = self._num_torn = 0
        self._last: int | None = None
        self._sizes: list[NDArray[np.int64]] = []

    def add(self, hashes: Hashes) -> None:
        """Add the session hashes of rows, in stored order."""
        if not len(hashes):
            return
        starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
        runs = np.ones(len(starts), np.int64)
        runs[0] = int(hashes[0]) != self._last
        self._last = int(hashes[-1])
        rows = np.diff(np.r_[starts, len(hashes)])
        self._runs.append(pa.table({"session": hashes[starts], "rows": rows, "runs": runs}))
        self._num_runs += len(starts)
        if self._num_runs > _MAX_RUNS + 2 * len(self._runs[0]):
            self._merge()

    def end_partition(self) -> None:
        """Finish the partition: keep only the sizes of its sessions."""
        sessions = self._merge()
        self._sizes.append(sessions["rows"].to_numpy())
        self._num_torn += int(np.count_nonzero(sessions["runs"].to_numpy() > 1))
        self._runs, self._num_runs, self._last = [], 0, None

    def result(self) -> SessionSummary:
        """Return statistics of all partitions. At least one row must have been added."""
        sizes = np.concatenate(self._sizes)
        return SessionSummary(
            count=len(sizes),
            samples_per_session=float(sizes.mean()),
            median=int(np.median(sizes)),
            longest=int(sizes.max()),
            histogram=histogram(sizes),
            torn=self._num_torn / len(sizes),
        )

    def _merge(self) -> pa.Table:
        names = ["session", "rows", "runs"]
        empty = pa.table([[]] * 3, schema=pa.schema([(name, pa.int64()) for name in names]))
        runs = pa.concat_tables(self._runs) if self._runs else empty
        merged = runs.group_by("session").aggregate([("rows", "sum"), ("runs", "sum")])
        merged = merged.select(["session", "rows_sum", "runs_sum"]).rename_columns(names)
        self._runs, self._num_runs = [merged], len(merged)
        return merged


def histogram(sizes: NDArray[np.int64]) -> dict[int, int]:
    """Map each 2^k to the number of ``sizes`` in (2^(k-1), 2^k], from 1 to the largest."""
    bins = np.bincount(np.ceil(np.log2(sizes)).astype(np.int64))
    return {1 << power: count for power, count in enumerate(bins.tolist())}


class SessionSample:
    """Keeps all rows of the sessions with the lowest hashes, within ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._limit = _ALL
        self._held: list[tuple[Hashes, pa.RecordBatch]] = []

    def add(self, batch: pa.RecordBatch, hashes: Hashes) -> None:
        """Add rows and their session hashes, in stored order."""
        self._held.append(self._sampled(hashes, batch))
        while sum(rows.nbytes for _, rows in self._held) > self._max_bytes and self._limit > 1:
            self._limit //= 2
            self._held = [self._sampled(*each) for each in self._held]
        if len(self._held) > _MAX_BATCHES:
            self._held = [self._joined()]

    def by_session(self, time: str) -> tuple[Hashes, pa.RecordBatch]:
        """Return hashes and rows sorted by session, then column ``time``, then stored order."""
        hashes, rows = self._joined()
        self._held = []
        order = {"session": hashes, "time": rows[time], "row": np.arange(len(hashes))}
        places = pc.sort_indices(pa.table(order), [(name, "ascending") for name in order])
        return hashes[places.to_numpy()], rows.take(places)

    def _sampled(self, hashes: Hashes, batch: pa.RecordBatch) -> tuple[Hashes, pa.RecordBatch]:
        if self._limit == _ALL:
            return hashes, batch
        chosen = hashes < np.uint64(self._limit)
        return hashes[chosen], batch.filter(pa.array(chosen))

    def _joined(self) -> tuple[Hashes, pa.RecordBatch]:
        hashes, batches = zip(*self._held, strict=True)
        return np.concatenate(hashes), pa.concat_batches(batches)


@dataclass(frozen=True)
class BatchSummary:
    """Batch statistics of a table.

    Attributes:
        batches: number of batches.
        rows: total number of rows in the batches.
        samples_per_session: S, the mean number of rows per session in a batch.
        histogram: number of sessions per size within a batch, as in ``SessionSummary``.
    """

    batches: int
    rows: int
    samples_per_session: float
    histogram: dict[int, int]


class BatchMeter:
    """Deduplicates whole batches of rows like a converter. Drops an incomplete last batch.

    Args:
        groups: groups of features that are deduplicated together.
        batch_size: rows per batch. A smaller table is a single batch.
    """

    def __init__(self, groups: Sequence[tuple[str, ...]], batch_size: int) -> None:
        self._groups = list(groups)
        self._batch_size = batch_size
        self._deduplicate = dedup.Deduplicator()
        self._waiting: list[pa.RecordBatch] = []
        self._hashes: list[Hashes] = []
        self._num_waiting = self._batches = self._rows = self._sessions = 0
        self._histogram: Counter[int] = Counter()
        self._ids = np.zeros((2, len(self._groups)), np.int64)

    def add(self, batch: pa.RecordBatch, hashes: Hashes) -> None:
        """Add rows, with features as list<int64>, and the session hashes of the rows."""
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
        """Return statistics of all batches so far."""
        if not self._batches and self._num_waiting:
            self._measure()
        histogram = dict(sorted(self._histogram.items()))
        per_session = self._rows / max(1, self._sessions)
        return BatchSummary(self._batches, self._rows, per_session, histogram)

    def dedupe_factors(self) -> dict[tuple[str, ...], float]:
        """Return each group's ids divided by its ids in unique rows. Call ``result`` first."""
        pairs = zip(self._groups, *self._ids.tolist(), strict=True)
        return {group: ids / stored if stored else 1.0 for group, ids, stored in pairs}

    def total_factor(self) -> float:
        """Return total ids divided by ids in unique rows, over all groups."""
        ids, stored = self._ids.sum(1).tolist()
        return ids / stored if stored else 1.0

    def _measure(self) -> None:
        batch, hashes = pa.concat_batches(self._waiting), np.concatenate(self._hashes)
        self._waiting, self._hashes, self._num_waiting = [], [], 0
        groups = [[_column(batch, name) for name in group] for group in self._groups]
        for index, unique in enumerate(self._deduplicate(groups, batch.num_rows)):
            self._ids[0, index] += sum(int(ends[-1] - ends[0]) for _, ends in groups[index])
            self._ids[1, index] += unique.values[0].size
        sizes = np.unique(hashes, return_counts=True)[1]
        self._batches += 1
        self._rows += batch.num_rows
        self._sessions += len(sizes)
        self._histogram.update(histogram(sizes))


def _column(batch: pa.RecordBatch, name: str) -> tuple[np.ndarray, np.ndarray]:
    lists = batch.column(name)
    return lists.values.to_numpy(), lists.offsets.to_numpy()


#: Minimum share of coinciding changes for two features to form a group.
_MIN_COINCIDENCE = 0.95


def coinciding(changed: dict[str, Bools]) -> Iterator[tuple[str, ...]]:
    """Group features whose lists change in the same rows.

    A feature joins the first group whose first feature changes in nearly all of the same rows.

    Args:
        changed: maps each feature to a mask of rows that differ from the previous row of the
            session.
    """
    groups: list[list[str]] = []
    for name, mine in changed.items():
        for group in groups:
            other = changed[group[0]]
            either = np.count_nonzero(mine | other)
            if np.count_nonzero(mine & other) >= _MIN_COINCIDENCE * either:
                group.append(name)
                break
        else:
            groups.append([name])
    return map(tuple, groups)
