"""Whole sessions of a table, held in bounded memory: what the table would be like by session."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_recd.analyze.session_counts import HASHES
from recd_plugins.api import SessionKeys

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
