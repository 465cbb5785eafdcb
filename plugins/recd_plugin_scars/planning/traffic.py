"""What is moved between the slow and the fast memory, as ``CacheTraffic`` counts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from recd_plugin_scars.planning.cost import BatchRows, row_bytes
from recd_plugin_scars.planning.load import TableLoad

Policy = Literal["static", "lfu", "lru"]


@dataclass(frozen=True)
class TableTraffic:
    """The traffic of one table in a step of all ranks, expected.

    A miss is read from the backing store once, and written back once, with its optimizer state.

    Attributes:
        lookups: ids, after deduplication.
        unique_rows: distinct rows of the batch of all ranks.
        cold_lookups: lookups of rows that are not among the most read ones that fit.
        misses: distinct rows that have to be fetched.
        row_bytes: weights and state.
        weight_bytes: of them of the weights.
    """

    lookups: float
    unique_rows: float
    cold_lookups: float
    misses: float
    row_bytes: int
    weight_bytes: int

    @property
    def hits(self) -> float:
        """Distinct rows that are in the fast memory already."""
        return self.unique_rows - self.misses

    @property
    def hit_rate(self) -> float:
        """Hits over distinct rows."""
        return self.hits / self.unique_rows if self.unique_rows else 0.0

    @property
    def bytes_read(self) -> float:
        """Bytes read of the backing store, with coalescing and the cache."""
        return self.misses * self.row_bytes

    @property
    def bytes_written(self) -> float:
        """Bytes written to the backing store, likewise."""
        return self.misses * self.row_bytes

    @property
    def bytes(self) -> float:
        """Read and written, with coalescing and the cache."""
        return 2 * self.misses * self.row_bytes

    @property
    def plain_bytes(self) -> float:
        """Read and written if each lookup moved its row."""
        return 2 * self.lookups * self.row_bytes

    @property
    def coalesced_bytes(self) -> float:
        """If each distinct row were moved."""
        return 2 * self.unique_rows * self.row_bytes

    @property
    def cached_bytes(self) -> float:
        """If each lookup of a row that is not cached moved it."""
        return 2 * self.cold_lookups * self.row_bytes

    def column_wise(self, shards: int) -> TableTraffic:
        """The same where so many shards have a part of each row: each looks all ids up.

        Row counts are the sums over the shards; each has a state of its own for a row.
        """
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
    """The traffic by table, of one step of all ranks.

    Table-wise and row-wise sharding come to the same: a row has one owner, which sees the ids of
    all ranks. ``TableTraffic.column_wise`` is for the third.

    Args:
        loads: of the tables.
        cached: rows of each that stay in the fast memory, the most read ones; 0 where it has none.
        batch_size: samples of all ranks.
        optimizer: ``sgd`` or ``rowwise_adagrad``.
        held: batches whose rows are still in the fast memory when the next one's are fetched: 0
            without lookahead, 1 with it.
        policy: which rows stay. Of ``lru`` misses are approximate (``BatchRows.lru_batches``).
            ``lfu`` is taken for ``static``, which it comes close to: no policy that does not know
            the future misses less.
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
