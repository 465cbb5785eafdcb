"""Reads of a table's rows, and the rows and bytes that they move per batch (SCARS, II to IV)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api import TableAccess

# This many of the most read rows are kept separate. Further rows share a segment while their reads
# differ by less than this factor. The relative error of sums is then about its square over 24.
_APART, _WIDTH = 1 << 16, 1e-3
_BYTES_PER_SCALAR = 4


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows grouped into segments with similar read counts, most read first.

    Attributes:
        probabilities: probability that a lookup reads one given row of the segment, float64
            ``[segments]``.
        ends: segment ``i`` has the rows of ranks ``ends[i]`` to ``ends[i + 1]``, int64
            ``[segments + 1]``.
    """

    probabilities: NDArray[np.float64]
    ends: NDArray[np.int64]

    @property
    def num_rows(self) -> NDArray[np.int64]:
        return np.diff(self.ends)


@dataclass(frozen=True, eq=False)
class TableLoad:
    """A table and how often its rows are read, after deduplication (SCARS).

    Raises:
        DataError: the profile has no reads.
    """

    access: TableAccess
    embedding_dim: int

    def __post_init__(self) -> None:
        if not self.access.total > 0:
            raise DataError(
                f"table {self.name!r}: the access profile has no reads. Profile the current data."
            )

    @property
    def name(self) -> str:
        return self.access.table

    @property
    def num_embeddings(self) -> int:
        return self.access.num_embeddings

    @property
    def lookups(self) -> float:
        """Return l, the mean lookups per sample."""
        return self.access.total / self.access.samples

    @cached_property
    def segments(self) -> Segments:
        access = self.access
        reads, tail_rows, tail_reads = access.accesses, access.tail_rows, access.tail_accesses
        if tail_rows:
            # A sketch cannot separate rows with fewer reads than its unknown rows.
            kept = len(reads) - int(np.searchsorted(reads[::-1], tail_reads / tail_rows, "left"))
            tail_rows += len(reads) - kept
            tail_reads += float(reads[kept:].sum())
            reads = reads[:kept]
        ends = _ends(reads)
        sums = np.add.reduceat(reads, ends[:-1]) if len(reads) else reads
        probabilities = sums / np.diff(ends)
        if tail_rows:
            probabilities = np.append(probabilities, tail_reads / tail_rows)
            ends = np.append(ends, self.num_embeddings)
        return Segments(np.minimum(probabilities / access.total, 1.0), ends)

    def hot_rows(self, rows: int) -> NDArray[np.int64]:
        """Return the ids of the ``rows`` most read rows, int64 ``[rows]``; unknown ones last."""
        known = self.access.rows[:rows]
        if rows <= len(known):
            return known
        others = np.ones(self.num_embeddings, dtype=np.bool_)
        others[known] = False
        return np.concatenate([known, np.flatnonzero(others)[: rows - len(known)]])


def _ends(reads: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the segment starts of non-increasing ``reads``, and the end."""
    if len(reads) <= _APART:
        return np.arange(len(reads) + 1)
    further = reads[_APART:]
    read = len(further) - int(np.searchsorted(further[::-1], 0.0, "right"))
    starts = [np.arange(_APART + 1)]
    if read:
        bounds = np.exp(np.arange(np.log(further[0]), np.log(further[read - 1]) - _WIDTH, -_WIDTH))
        # In a falling array: the number of values at or above a bound.
        starts.append(len(reads) - np.searchsorted(reads[::-1], bounds, "left"))
        starts.append(np.array([_APART + read]))
    # Almost in order, so this is much faster than np.unique, which hashes.
    inner = np.sort(np.concatenate(starts))
    return np.append(inner[np.diff(inner, append=len(reads)) > 0], len(reads))


def seen(probabilities: NDArray[np.float64], lookups: float) -> NDArray[np.float64]:
    """Return u, the probability that a row is among independent lookups (SCARS, eq. 2).

    ``u = 1 - (1 - P)^lookups``, where ``probabilities`` P are per lookup, float64 ``[rows]``.
    """
    with np.errstate(divide="ignore"):
        result: NDArray[np.float64] = -np.expm1(lookups * np.log1p(-probabilities))
    return result


def row_bytes(embedding_dim: int, optimizer: str) -> int:
    """Return the bytes of a row: float32 weights, plus 4 bytes with ``rowwise_adagrad``."""
    return _BYTES_PER_SCALAR * (embedding_dim + (optimizer == "rowwise_adagrad"))


class BatchRows:
    """Expected number of a table's rows that a batch of all ranks reads.

    Attributes:
        lookups: lookups of the batch.
        unique: distinct rows of the batch.
        left: distinct rows that are not in the first segments, by number of segments, float64
            ``[segments + 1]``.
    """

    def __init__(self, load: TableLoad, batch_size: float) -> None:
        self.load = load
        self.lookups = batch_size * load.lookups
        self._seen = seen(load.segments.probabilities, self.lookups)
        self.left = _from_rank(self._seen * load.segments.num_rows)
        self.unique = float(self.left[0])

    def cold(self, cached: int) -> float:
        """Return the distinct rows outside the ``cached`` most read ones."""
        return self._beyond(cached, self._seen, self.left)

    def missed(self, cached: int, held: float) -> float:
        """Return the distinct rows that are neither cached nor held by ``held`` preceding batches.

        The sum of ``u * (1 - u)^held``.
        """
        missed = self._seen * (1 - self._seen) ** held
        return self._beyond(cached, missed, _from_rank(missed * self.load.segments.num_rows))

    def _beyond(self, cached: int, each: NDArray[np.float64], left: NDArray[np.float64]) -> float:
        ends = self.load.segments.ends
        if cached >= ends[-1]:
            return 0.0
        segment = int(np.searchsorted(ends, cached, "right")) - 1
        part = float(ends[segment + 1] - cached) * float(each[segment])
        return float(left[segment + 1]) + part


def _from_rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of values from each index on, ``[n + 1]``, adding small values first."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


@dataclass(frozen=True)
class TableTraffic:
    """Expected traffic of one table per step over all ranks.

    Each miss is read from the backing store once and written back once, including its optimizer
    state.

    Attributes:
        lookups: ids, after deduplication.
        unique_rows: distinct rows of the batch of all ranks.
        misses: distinct rows that are fetched.
        row_bytes: bytes of a row's weights and state.
        weight_bytes: bytes of its weights.
    """

    lookups: float
    unique_rows: float
    misses: float
    row_bytes: int
    weight_bytes: int

    @property
    def hits(self) -> float:
        return self.unique_rows - self.misses

    @property
    def hit_rate(self) -> float:
        return self.hits / self.unique_rows if self.unique_rows else 0.0

    @property
    def bytes_read(self) -> float:
        return self.misses * self.row_bytes

    @property
    def bytes_written(self) -> float:
        return self.misses * self.row_bytes

    @property
    def bytes(self) -> float:
        """Return the bytes read and written with coalescing and the cache."""
        return 2 * self.misses * self.row_bytes

    @property
    def plain_bytes(self) -> float:
        """Return the bytes if each lookup moved its row."""
        return 2 * self.lookups * self.row_bytes

    @property
    def coalesced_bytes(self) -> float:
        """Return the bytes if each distinct row were moved."""
        return 2 * self.unique_rows * self.row_bytes

    def column_wise(self, shards: int) -> TableTraffic:
        """Return the sums over column shards; each shard has its own optimizer state per row."""
        state = self.row_bytes - self.weight_bytes
        return replace(
            self,
            lookups=self.lookups * shards,
            unique_rows=self.unique_rows * shards,
            misses=self.misses * shards,
            row_bytes=self.weight_bytes // shards + state,
            weight_bytes=self.weight_bytes // shards,
        )
