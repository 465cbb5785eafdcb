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
#: Runs that wait to be grouped by session, and batches that wait to be joined.
_MAX_RUNS, _MAX_BATCHES = 1 << 18, 64


@dataclass(frozen=True)
class SessionSummary:
    """Sessions of a table, each counted once in each partition.

    Attributes:
        count: how many.
        samples_per_session: S, their mean rows.
        median, longest: rows of a session.
        histogram: by a power of two, sessions with at most so many rows and more than half of it.
        torn: share of the sessions whose rows do not lie together.
    """

    count: int
    samples_per_session: float
    median: int
    longest: int
    histogram: dict[int, int]
    torn: float


class SessionCounts:
    """Counts the rows and runs of each session; holds the sessions of one partition."""

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
        """Start a new partition; keep only the sizes of sessions so far."""
        sessions = self._merge()
        self._sizes.append(sessions["rows"].to_numpy())
        self._num_torn += int(np.count_nonzero(sessions["runs"].to_numpy() > 1))
        self._runs, self._num_runs, self._last = [], 0, None

    def result(self) -> SessionSummary:
        """Summarize all partitions; there is at least one row."""
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
    """Count ``sizes`` (at least 1) in (2^(k-1), 2^k], by 2^k, from 1 to the largest."""
    bins = np.bincount(np.ceil(np.log2(sizes)).astype(np.int64))
    return {1 << power: count for power, count in enumerate(bins.tolist())}


class SessionSample:
    """All rows of the sessions with the lowest hashes, as many as fit into ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._limit = _ALL
        self._held: list[tuple[Hashes, pa.RecordBatch]] = []

    def add(self, batch: pa.RecordBatch, hashes: Hashes) -> None:
        """Offer rows and the hashes of their sessions, in stored order."""
        self._held.append(self._sampled(hashes, batch))
        while sum(rows.nbytes for _, rows in self._held) > self._max_bytes and self._limit > 1:
            self._limit //= 2
            self._held = [self._sampled(*each) for each in self._held]
        if len(self._held) > _MAX_BATCHES:
            self._held = [self._joined()]

    def by_session(self, time: str) -> tuple[Hashes, pa.RecordBatch]:
        """Return hashes and rows by session, then by the column ``time``, then as stored."""
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
    """Batches of a table.

    Attributes:
        batches: how many.
        rows: rows in all of them.
        samples_per_session: S, the mean rows of a session in a batch.
        histogram: sessions of batches by their rows there, as in ``SessionSummary``.
    """

    batches: int
    rows: int
    samples_per_session: float
    histogram: dict[int, int]


class BatchMeter:
    """Deduplicates whole batches of rows, as a converter would; the last rows may fill none.

    Args:
        groups: features that are deduplicated together.
        batch_size: rows of a batch; if there are fewer, all of them are one.
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
        """Summarize all batches so far."""
        if not self._batches and self._num_waiting:
            self._measure()
        histogram = dict(sorted(self._histogram.items()))
        per_session = self._rows / max(1, self._sessions)
        return BatchSummary(self._batches, self._rows, per_session, histogram)

    def dedupe_factors(self) -> dict[tuple[str, ...], float]:
        """Return by group ids over ids in unique rows; call ``result`` first."""
        pairs = zip(self._groups, *self._ids.tolist(), strict=True)
        return {group: ids / stored if stored else 1.0 for group, ids, stored in pairs}

    def total_factor(self) -> float:
        """Return ids over ids in unique rows, of all groups together."""
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


#: Share of the changes of two features that coincide, from which they form a group.
_MIN_COINCIDENCE = 0.95


def coinciding(changed: dict[str, Bools]) -> Iterator[tuple[str, ...]]:
    """Group features that change together.

    A feature joins the first group with whose first feature nearly all its changes coincide.

    Args:
        changed: by feature, whether each row differs from the one before in its session.
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
