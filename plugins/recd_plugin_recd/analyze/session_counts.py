"""How many rows sessions have, and whether they lie together, in bounded memory.

Sessions are told apart by a 64-bit hash. Those with the lowest hashes are counted: which ones these
are is known from a session's first row on, so their counts are complete. When too many are held
the bound is halved. What is counted is a random sample of sessions; all of them where they are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
