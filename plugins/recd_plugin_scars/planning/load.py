"""How often rows of a table are read, and the resulting cache traffic (SCARS, II to IV)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api import TableAccess

# The _APART most read rows have a segment each. Further rows share a segment if their reads differ
# by a factor below 1 + _WIDTH. The relative error of sums is then about _WIDTH ** 2 / 24.
_APART, _WIDTH = 1 << 16, 1e-3
_BYTES_PER_SCALAR = 4


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows sorted by reads, most read first, and grouped into segments with similar reads.

    Attributes:
        probabilities: probability that a lookup reads a particular row of the segment, float64
            ``[num_segments]``.
        ends: segment ``i`` consists of sorted rows ``ends[i]`` to ``ends[i + 1]``, int64
            ``[num_segments + 1]``.
    """

    probabilities: NDArray[np.float64]
    ends: NDArray[np.int64]

    @property
    def num_rows(self) -> NDArray[np.int64]:
        return np.diff(self.ends)


@dataclass(frozen=True, eq=False)
class TableLoad:
    """An embedding table, and how often its rows are read after deduplication of batches.

    Raises:
        DataError: the access profile has no reads.
    """

    access: TableAccess
    embedding_dim: int

    def __post_init__(self) -> None:
        if not self.access.total > 0:
            raise DataError(
                f"table {self.name!r}: the access profile has no reads. Profile the current data "
                "again with recd profile registry."
            )

    @property
    def name(self) -> str:
        return self.access.table

    @property
    def num_embeddings(self) -> int:
        return self.access.num_embeddings

    @property
    def lookups(self) -> float:
        """Return the mean number of lookups per sample (l in the SCARS paper)."""
        return self.access.total / self.access.samples

    @cached_property
    def segments(self) -> Segments:
        access = self.access
        reads, tail_rows, tail_reads = access.accesses, access.tail_rows, access.tail_accesses
        if tail_rows:
            # Read counts below the mean of unknown rows are not reliable in an approximate profile.
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
        """Return the ids of the ``rows`` most read rows, int64 ``[rows]``.

        Appends rows that are not in the access profile if it has too few.
        """
        known = self.access.rows[:rows]
        if rows <= len(known):
            return known
        others = np.ones(self.num_embeddings, dtype=np.bool_)
        others[known] = False
        return np.concatenate([known, np.flatnonzero(others)[: rows - len(known)]])


def _ends(reads: NDArray[np.float64]) -> NDArray[np.int64]:
    """Divide non-increasing ``reads`` into segments of similar reads. Return ``Segments.ends``."""
    if len(reads) <= _APART:
        return np.arange(len(reads) + 1)
    further = reads[_APART:]
    read = len(further) - int(np.searchsorted(further[::-1], 0.0, "right"))
    starts = [np.arange(_APART + 1)]
    if read:
        bounds = np.exp(np.arange(np.log(further[0]), np.log(further[read - 1]) - _WIDTH, -_WIDTH))
        # For each bound, the number of reads at or above the bound.
        starts.append(len(reads) - np.searchsorted(reads[::-1], bounds, "left"))
        starts.append(np.array([_APART + read]))
    # Almost in order, so this is much faster than np.unique, which hashes.
    inner = np.sort(np.concatenate(starts))
    return np.append(inner[np.diff(inner, append=len(reads)) > 0], len(reads))


def seen(probabilities: NDArray[np.float64], lookups: float) -> NDArray[np.float64]:
    """Return the probability that at least one of ``lookups`` reads each row (SCARS, eq. 2).

    Computes ``u = 1 - (1 - P)^lookups`` for independent lookups. ``probabilities`` is P, the
    probability that one lookup reads each row, float64 ``[num_rows]``.
    """
    with np.errstate(divide="ignore"):
        result: NDArray[np.float64] = -np.expm1(lookups * np.log1p(-probabilities))
    return result


def row_bytes(embedding_dim: int, optimizer: str) -> int:
    """Return the bytes of a row's float32 weights, plus 4 for the state of ``rowwise_adagrad``."""
    return _BYTES_PER_SCALAR * (embedding_dim + (optimizer == "rowwise_adagrad"))


class BatchRows:
    """Expected number of rows that the ranks read from a table in one step.

    Attributes:
        lookups: number of lookups.
        unique: number of distinct rows.
        left: float64 ``[num_segments + 1]``. Rows are sorted by read count and grouped into
            segments of nearly equal counts. Element ``i`` is the expected number of distinct rows
            outside of the first ``i`` segments.
    """

    def __init__(self, load: TableLoad, batch_size: float) -> None:
        self.load = load
        self.lookups = batch_size * load.lookups
        self._seen = seen(load.segments.probabilities, self.lookups)
        self.left = _from_rank(self._seen * load.segments.num_rows)
        self.unique = float(self.left[0])

    def cold(self, cached: int) -> float:
        """Return the number of distinct rows that are not among the ``cached`` most read rows."""
        return self._beyond(cached, self._seen, self.left)

    def missed(self, cached: int, held: float) -> float:
        """Return the number of distinct rows to fetch, the sum of ``u * (1 - u)^held``.

        ``u`` is the probability that a batch reads a row. Excludes the ``cached`` most read rows
        and the rows of the ``held`` preceding batches.
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
    """Return the sum of ``values[i:]`` for each ``i``, float64 ``[n + 1]``."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


@dataclass(frozen=True)
class TableTraffic:
    """Expected traffic per step between a table's cache and its backing store, over all ranks.

    Each missing row is read once and written back once, with its optimizer state.

    Attributes:
        lookups: number of looked-up ids, after deduplication.
        unique_rows: number of distinct rows in the step's batches.
        misses: number of distinct rows that are not cached.
        row_bytes: bytes of a row's weights and optimizer state.
        weight_bytes: bytes of a row's weights.
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
        """Return the bytes of missing rows, read from host memory or files and written back."""
        return 2 * self.misses * self.row_bytes

    @property
    def plain_bytes(self) -> float:
        """Return the bytes if every lookup read and wrote its row, without a cache."""
        return 2 * self.lookups * self.row_bytes

    @property
    def coalesced_bytes(self) -> float:
        """Return the bytes if every distinct row was read and written once, without a cache."""
        return 2 * self.unique_rows * self.row_bytes

    def column_wise(self, shards: int) -> TableTraffic:
        """Return the traffic of a column-wise sharded table, summed over ``shards`` shards.

        Each shard has its own optimizer state for each row.
        """
        state = self.row_bytes - self.weight_bytes
        return replace(
            self,
            lookups=self.lookups * shards,
            unique_rows=self.unique_rows * shards,
            misses=self.misses * shards,
            row_bytes=self.weight_bytes // shards + state,
            weight_bytes=self.weight_bytes // shards,
        )
