"""Reads of a table's rows, and the rows and bytes that a batch moves for them (SCARS, II to IV)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugins.api import DataError

if TYPE_CHECKING:
    from recd_plugins.api import TableAccess

# So many of the most read rows are kept apart; further ones are together while their reads differ
# by less than this part. Sums over them are then exact to about its square over 24.
_APART, _WIDTH = 1 << 16, 1e-3
_BYTES_PER_SCALAR = 4

Policy = Literal["static", "lfu", "lru"]


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows in segments that are read alike, most read first.

    Attributes:
        probabilities: of one lookup to be of one row of the segment, float64 ``[segments]``.
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
            raise DataError(f"table {self.name}: its access profile has no reads")

    @property
    def name(self) -> str:
        return self.access.table

    @property
    def num_embeddings(self) -> int:
        return self.access.num_embeddings

    @property
    def lookups(self) -> float:
        """l: mean lookups of one sample."""
        return self.access.total / self.access.samples

    @cached_property
    def segments(self) -> Segments:
        access = self.access
        reads, tail_rows, tail_reads = access.accesses, access.tail_rows, access.tail_accesses
        if tail_rows:
            # A sketch cannot tell rows apart that have fewer reads than those it does not know.
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

    @cached_property
    def read_rows(self) -> int:
        """Number of rows that are read at all."""
        segments = self.segments
        return int(segments.num_rows[segments.probabilities > 0].sum())

    def covered(self, rows: int) -> float:
        """Return the share of lookups of the ``rows`` most read rows."""
        return self.access.covered(rows)

    def hot_rows(self, rows: int) -> NDArray[np.int64]:
        """Return the ids of the ``rows`` most read rows, int64 ``[rows]``; unknown ones last."""
        known = self.access.rows[:rows]
        if rows <= len(known):
            return known
        others = np.ones(self.num_embeddings, dtype=np.bool_)
        others[known] = False
        return np.concatenate([known, np.flatnonzero(others)[: rows - len(known)]])


def _ends(reads: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the starts of segments of ``reads``, non-increasing, and the end."""
    if len(reads) <= _APART:
        return np.arange(len(reads) + 1)
    further = reads[_APART:]
    read = len(further) - int(np.searchsorted(further[::-1], 0.0, "right"))
    starts = [np.arange(_APART + 1)]
    if read:
        bounds = np.exp(np.arange(np.log(further[0]), np.log(further[read - 1]) - _WIDTH, -_WIDTH))
        # Of a falling array: how many are at or above a bound.
        starts.append(len(reads) - np.searchsorted(reads[::-1], bounds, "left"))
        starts.append(np.array([_APART + read]))
    # Almost in order, so this is much faster than np.unique, which hashes.
    inner = np.sort(np.concatenate(starts))
    return np.append(inner[np.diff(inner, append=len(reads)) > 0], len(reads))


def seen(probabilities: NDArray[np.float64], lookups: float) -> NDArray[np.float64]:
    """Return u, the probability of rows to be among independent lookups (SCARS, eq. 2).

    That is ``1 - (1 - P)^lookups`` for ``probabilities`` P of one lookup, float64 ``[rows]``.
    """
    if not lookups:
        return np.zeros_like(probabilities)
    with np.errstate(divide="ignore"):
        result: NDArray[np.float64] = -np.expm1(lookups * np.log1p(-probabilities))
    return result


def expected_unique(probabilities: NDArray[np.float64], lookups: float) -> float:
    """Return the expected distinct rows among lookups, the sum of ``seen`` (SCARS, eq. 2)."""
    return float(seen(probabilities, lookups).sum())


def row_bytes(embedding_dim: int, optimizer: str) -> int:
    """Return the bytes of float32 weights, and with ``rowwise_adagrad`` of a float32 of state."""
    return _BYTES_PER_SCALAR * (embedding_dim + (optimizer == "rowwise_adagrad"))


class BatchRows:
    """Expected numbers of rows of a table that a batch of all ranks reads.

    Attributes:
        lookups: of the batch.
        unique: distinct rows.
        left: distinct rows after each number of segments, float64 ``[segments + 1]``.
    """

    def __init__(self, load: TableLoad, batch_size: float) -> None:
        self.load = load
        self.lookups = batch_size * load.lookups
        self._seen = seen(load.segments.probabilities, self.lookups)
        self.left = _from_rank(self._seen * load.segments.num_rows)
        self.unique = float(self.left[0])

    def cold(self, cached: int) -> float:
        """Return the distinct rows that are not among the ``cached`` most read ones."""
        return self._beyond(cached, self._seen, self.left)

    def missed(self, cached: int, held: float) -> float:
        """Return the distinct rows that are neither cached nor held by ``held`` batches before.

        The sum of ``u * (1 - u)^held``; of a part of a batch, so large a part of its rows is held.
        """
        if not held:
            return self.cold(cached)
        if math.isinf(held):
            return 0.0
        whole = math.floor(held)
        missed = self._seen * (1 - self._seen) ** whole * (1 - (held - whole) * self._seen)
        return self._beyond(cached, missed, _from_rank(missed * self.load.segments.num_rows))

    def lru_batches(self, cached: int, held: float = 0) -> float:
        """Return the batches after which an unread row leaves an LRU cache, infinite if never.

        Che's approximation: the distinct rows of so many batches fill the cache, beside those of
        ``held`` batches (Che, Tung and Wang, Hierarchical Web caching systems, 2002).
        """
        room = cached + self._rows_of(held)
        if room >= self.load.read_rows:
            return math.inf
        low, high = 0, 1
        while self._rows_of(high) <= room:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._rows_of(middle) <= room else (low, middle)
        filled = self._rows_of(low)
        # Of the batch that does not fit altogether, some rows are left.
        return low + (room - filled) / (self._rows_of(high) - filled)

    def _rows_of(self, batches: float) -> float:
        return float(seen(self._seen, batches) @ self.load.segments.num_rows)

    def _beyond(self, cached: int, each: NDArray[np.float64], left: NDArray[np.float64]) -> float:
        ends = self.load.segments.ends
        if cached >= ends[-1]:
            return 0.0
        segment = int(np.searchsorted(ends, cached, "right")) - 1
        part = float(ends[segment + 1] - cached) * float(each[segment])
        return float(left[segment + 1]) + part


def _from_rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums from each place on, ``[n + 1]``; small values are added first."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


@dataclass(frozen=True)
class TableTraffic:
    """Expected traffic of one table in a step of all ranks.

    A miss is read from the backing store once, and written back once, with its optimizer state.

    Attributes:
        lookups: ids, after deduplication.
        unique_rows: distinct rows of the batch of all ranks.
        cold_lookups: lookups of rows that are not cached.
        misses: distinct rows that are fetched.
        row_bytes: bytes of a row's weights and state.
        weight_bytes: bytes of its weights.
    """

    lookups: float
    unique_rows: float
    cold_lookups: float
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
        """Bytes read and written, with coalescing and the cache."""
        return 2 * self.misses * self.row_bytes

    @property
    def plain_bytes(self) -> float:
        """Bytes if each lookup moved its row."""
        return 2 * self.lookups * self.row_bytes

    @property
    def coalesced_bytes(self) -> float:
        """Bytes if each distinct row were moved."""
        return 2 * self.unique_rows * self.row_bytes

    @property
    def cached_bytes(self) -> float:
        """Bytes if each lookup of a row that is not cached moved it."""
        return 2 * self.cold_lookups * self.row_bytes

    def column_wise(self, shards: int) -> TableTraffic:
        """Return the sums over column shards; each has its own optimizer state of a row."""
        state = self.row_bytes - self.weight_bytes
        return replace(
            self,
            lookups=self.lookups * shards,
            unique_rows=self.unique_rows * shards,
            cold_lookups=self.cold_lookups * shards,
            misses=self.misses * shards,
            row_bytes=self.weight_bytes // shards + state,
            weight_bytes=self.weight_bytes // shards,
        )


def traffic(
    loads: Sequence[TableLoad],
    cached: Mapping[str, int],
    *,
    batch_size: int,
    optimizer: str,
    held: float = 0,
    policy: Policy = "static",
) -> dict[str, TableTraffic]:
    """Return the traffic by table of one step of all ranks, table-wise or row-wise.

    Args:
        loads: of the tables.
        cached: by table, number of the most read rows that stay in the fast memory.
        batch_size: samples of all ranks.
        optimizer: ``sgd`` or ``rowwise_adagrad``.
        held: batches whose rows are in the fast memory when the next one's are fetched: 0 without
            lookahead, 1 with it.
        policy: rows that stay. ``lru`` is approximate (``BatchRows.lru_batches``), ``lfu`` is taken
            for ``static``, which it comes close to.
    """
    found = {}
    for load in loads:
        rows, kept = BatchRows(load, batch_size), cached.get(load.name, 0)
        missed = rows.missed(kept, held)
        if policy == "lru":
            missed = rows.missed(0, rows.lru_batches(kept, held))
        found[load.name] = TableTraffic(
            lookups=rows.lookups,
            unique_rows=rows.unique,
            cold_lookups=rows.lookups * max(0.0, 1 - load.covered(kept)),
            misses=missed,
            row_bytes=row_bytes(load.embedding_dim, optimizer),
            weight_bytes=row_bytes(load.embedding_dim, "sgd"),
        )
    return found
