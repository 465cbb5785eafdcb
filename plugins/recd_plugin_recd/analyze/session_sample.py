"""Whole sessions of a table, held in bounded memory: what the table would be like by session."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_recd.analyze.session_counts import HASHES
from recd_plugins.interfaces import SessionKeys

#: Random parts of the sample, from whose differences sampling errors follow.
NUM_PARTS = 16


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
        self._held: list[tuple[NDArray[np.uint64], pa.RecordBatch]] = []
        self._bytes = 0
        self._full = False

    @property
    def rate(self) -> float:
        """The share of sessions that are held."""
        return self._limit / HASHES

    @property
    def num_rows(self) -> int:
        """Rows that are held."""
        return sum(len(hashes) for hashes, _ in self._held)

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

    def by_session(self) -> Iterator[tuple[NDArray[np.uint64], pa.RecordBatch]]:
        """The rows by session and time in ``NUM_PARTS`` random parts, whole sessions each."""
        for part in range(NUM_PARTS):
            hashes, batches = [], []
            for held, batch in self._held:
                mine = held % np.uint64(NUM_PARTS) == part
                if mine.any():
                    hashes.append(held[mine])
                    batches.append(batch.filter(pa.array(mine)))
            if hashes:
                yield _sorted(np.concatenate(hashes), pa.Table.from_batches(batches), self._keys)

    def _hold(self, batch: pa.RecordBatch, hashes: NDArray[np.uint64]) -> None:
        if self._limit < HASHES:
            sampled = hashes < np.uint64(self._limit)
            if not sampled.any():
                return
            if not sampled.all():
                hashes, batch = hashes[sampled], batch.filter(pa.array(sampled))
        self._held.append((hashes, batch))
        self._bytes += batch.nbytes


def _sorted(
    hashes: NDArray[np.uint64], table: pa.Table, keys: SessionKeys
) -> tuple[NDArray[np.uint64], pa.RecordBatch]:
    order = {"session": hashes, "time": table[keys.timestamp], "row": np.arange(len(hashes))}
    places = pc.sort_indices(pa.table(order), [(name, "ascending") for name in order])
    (batch,) = table.take(places).combine_chunks().to_batches()
    return hashes[places.to_numpy()], batch
