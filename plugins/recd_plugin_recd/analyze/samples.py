"""Samples of sessions and batches in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugins.api import Deduplicator, SessionKeys

#: Sessions that are counted at most.
MAX_SESSIONS = 1 << 16
#: Runs that wait to be added up, at most a batch more.
_MAX_WAITING = 1 << 18

HASHES = 1 << 64


@dataclass(frozen=True)
class SessionSummary:
    """What is known of a table's sessions.

    Attributes:
        rate: share of the sessions that were counted, 1 if all.
        counted: how many these are.
        samples_per_session: S, their mean rows.
        standard_error: of S, from the spread among them; 0 if all were counted.
        median, longest: rows of a session.
        histogram: by a power of two, sessions with at most so many rows and more than half of it,
            scaled up to all.
        broken: share of the counted sessions whose rows do not lie together.
        first_break: row of the table at which one goes on after rows of another, None if none does.
    """

    rate: float
    counted: int
    samples_per_session: float
    standard_error: float
    median: int
    longest: int
    histogram: dict[int, int]
    broken: float
    first_break: int | None

    @property
    def sessions(self) -> int:
        """Sessions of the table, an estimate where not all were counted."""
        return round(self.counted / self.rate)

    @property
    def clustered(self) -> bool:
        """Whether the rows of each counted session lie together."""
        return self.first_break is None


class SessionCounts:
    """Takes the hashes of the session of each row, in stored order."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._limit = HASHES
        self._row = 0
        self._open: tuple[int, int, int] | None = None
        # Per counted session, and then per run that waits: hash, rows, runs, where it goes on.
        self._parts: list[tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]] = []
        self._num_waiting = 0
        self._hashes = np.empty(0, np.uint64)
        self._rows = np.empty(0, np.int64)
        self._runs = np.empty(0, np.int64)
        self._first_break: int | None = None

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add rows. Those of another partition need other hashes, as their sessions are others."""
        if not len(hashes):
            return
        starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
        lengths = np.diff(np.r_[starts, len(hashes)])
        run_hashes, places = hashes[starts], starts + self._row
        if self._open is not None:
            run_hash, place, length = self._open
            if run_hash == int(run_hashes[0]):
                places[0], lengths[0] = place, lengths[0] + length
            else:
                self._wait(np.array([run_hash], np.uint64), np.array([place]), np.array([length]))
        self._open = int(run_hashes[-1]), int(places[-1]), int(lengths[-1])
        self._wait(run_hashes[:-1], places[:-1], lengths[:-1])
        self._row += len(hashes)

    def result(self) -> SessionSummary:
        """The summary of all rows so far, at least one."""
        if self._open is not None:
            run_hash, place, length = self._open
            self._wait(np.array([run_hash], np.uint64), np.array([place]), np.array([length]))
            self._open = None
        self._add_up()
        rows, rate = self._rows, self._limit / HASHES
        spread = rows.std() / np.sqrt(len(rows)) * np.sqrt(1 - rate)
        return SessionSummary(
            rate=rate,
            counted=len(rows),
            samples_per_session=float(rows.mean()),
            standard_error=float(spread),
            median=int(np.median(rows)),
            longest=int(rows.max()),
            histogram=histogram(rows, 1 / rate),
            broken=float((self._runs > 1).mean()),
            first_break=self._first_break,
        )

    def _wait(
        self, hashes: NDArray[np.uint64], places: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        if self._limit < HASHES:
            sampled = hashes < np.uint64(self._limit)
            hashes, places, lengths = hashes[sampled], places[sampled], lengths[sampled]
        self._parts.append((hashes, places, lengths))
        self._num_waiting += len(hashes)
        if self._num_waiting > _MAX_WAITING:
            self._add_up()

    def _add_up(self) -> None:
        """Join the runs that wait to their sessions, and let go of sessions if there are many."""
        hashes = np.concatenate([self._hashes, *(part[0] for part in self._parts)])
        places = np.concatenate([np.full(len(self._hashes), -1), *(p[1] for p in self._parts)])
        rows = np.concatenate([self._rows, *(part[2] for part in self._parts)])
        runs = np.concatenate([self._runs, np.ones(len(rows) - len(self._runs), np.int64)])
        self._parts, self._num_waiting = [], 0
        # Stable: the runs of a session stay in the order of their places.
        order = np.argsort(hashes, kind="stable")
        hashes, places, rows, runs = hashes[order], places[order], rows[order], runs[order]
        again = np.r_[False, hashes[1:] == hashes[:-1]] if len(hashes) else np.empty(0, np.bool_)
        if again.any():
            found = int(places[again].min())
            self._first_break = found if self._first_break is None else self._first_break
        starts = np.flatnonzero(~again)
        self._hashes = hashes[starts]
        self._rows = np.add.reduceat(rows, starts) if len(starts) else rows
        self._runs = np.add.reduceat(runs, starts) if len(starts) else runs
        while len(self._hashes) > self._max_sessions:
            self._limit //= 2
            kept = self._hashes < np.uint64(self._limit)
            self._hashes, self._rows, self._runs = (
                self._hashes[kept], self._rows[kept], self._runs[kept],
            )  # fmt: skip


def histogram(sizes: NDArray[np.int64], scale: float = 1.0) -> dict[int, int]:
    """How many ``sizes``, >= 1, lie in (2^(k-1), 2^k], by 2^k, from 1 to the largest."""
    if not len(sizes):
        return {}
    bins = np.bincount(np.ceil(np.log2(sizes)).astype(np.int64))
    return {1 << power: round(count * scale) for power, count in enumerate(bins.tolist())}


def merge_histograms(parts: Sequence[dict[int, int]]) -> dict[int, int]:
    """The sum of histograms."""
    sizes = sorted({size for part in parts for size in part})
    return {size: sum(part.get(size, 0) for part in parts) for size in sizes}


#: Random parts of the sample, from whose differences sampling errors follow.
NUM_PARTS = 16
#: So many batches with fewer rows than this become one: Arrow takes some kB for any.
_JOINED, _SMALL = 32, 1024

#: Hashes of sessions, and the rows.
_Part = tuple[NDArray[np.uint64], pa.RecordBatch]


class SessionSample:
    """Holds all rows of the sessions whose hash is lowest, as many as fit.

    A single session that does not fit is cut off.

    Args:
        keys: columns of session and time.
        max_bytes: of Arrow data to hold; a batch more for a moment.
    """

    def __init__(self, keys: SessionKeys, max_bytes: int) -> None:
        self._keys = keys
        self._max_bytes = max_bytes
        self._limit = HASHES
        self._held: list[_Part] = []
        self._bytes = 0
        self._full = False
        self._parts: list[_Part] = []

    @property
    def rate(self) -> float:
        """The share of sessions that are held."""
        return self._limit / HASHES

    @property
    def num_rows(self) -> int:
        """Rows that are held."""
        return sum(len(hashes) for hashes, _ in (*self._held, *self._parts))

    def add(self, batch: pa.RecordBatch, hashes: NDArray[np.uint64]) -> None:
        """Offer rows and the hashes of their sessions, in stored order."""
        if self._full:
            return
        self._hold(batch, hashes)
        while self._bytes > self._max_bytes:
            held, self._held, self._bytes = self._held, [], 0
            sessions = np.unique(np.concatenate([hashes for hashes, _ in held]))
            if len(sessions) == 1:
                self._held, self._full = held, True
                return
            self._limit = max(self._limit // 2, int(sessions[0]) + 1)
            while held:
                hashes, batch = held.pop(0)
                self._hold(batch, hashes)

    def by_session(self) -> Iterator[_Part]:
        """The rows by session and time in ``NUM_PARTS`` random parts, whole sessions each."""
        if self._held:
            self._put_in_order()
        yield from self._parts

    def _put_in_order(self) -> None:
        """Move the rows that are held to their parts; memory is that of one part more."""
        parts: list[list[_Part]] = [[] for _ in range(NUM_PARTS)]
        while self._held:
            hashes, batch = self._held.pop()
            for number, part in enumerate(parts):
                mine = hashes % np.uint64(NUM_PARTS) == number
                if mine.any():
                    part.append((hashes[mine], batch.filter(pa.array(mine))))
        while parts:
            if part := parts.pop():
                part.reverse()  # in stored order again
                joined = _joined(part)
                part.clear()
                self._parts.append(_sorted(joined, self._keys))

    def _hold(self, batch: pa.RecordBatch, hashes: NDArray[np.uint64]) -> None:
        if self._limit < HASHES:
            sampled = hashes < np.uint64(self._limit)
            if not sampled.any():
                return
            if not sampled.all():
                hashes, batch = hashes[sampled], batch.filter(pa.array(sampled))
        self._held.append((hashes, batch))
        self._bytes += batch.nbytes
        last = self._held[-_JOINED:]
        if len(last) == _JOINED and all(len(each) < _SMALL for each, _ in last):
            self._held[-_JOINED:] = [_joined(last)]


def _joined(parts: list[_Part]) -> _Part:
    (batch,) = pa.Table.from_batches([each for _, each in parts]).combine_chunks().to_batches()
    return np.concatenate([hashes for hashes, _ in parts]), batch


def _sorted(part: _Part, keys: SessionKeys) -> _Part:
    hashes, batch = part
    order = {"session": hashes, "time": batch[keys.timestamp], "row": np.arange(len(hashes))}
    places = pc.sort_indices(pa.table(order), [(name, "ascending") for name in order])
    return hashes[places.to_numpy()], batch.take(places)


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
