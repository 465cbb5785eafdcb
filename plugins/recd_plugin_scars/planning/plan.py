"""Cache plans: how many rows of each table to cache in a shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from recd_plugin_scars.planning.load import BatchRows, TableLoad, TableTraffic, row_bytes
from recd_plugin_scars.planning.order import RowOrder

if TYPE_CHECKING:
    from recd_plugin_scars.planning.statistics import AccessStatistics

#: A row is useful in a cache if it is read more than once in this many steps.
STEPS = 10_000


@dataclass(frozen=True, eq=False)
class CachedTable:
    """The planned cache of one table.

    Attributes:
        load: the table and how often its rows are read.
        cached: number of most read rows that stay in the cache.
        traffic: expected traffic per step over all ranks.
    """

    load: TableLoad
    cached: int
    traffic: TableTraffic

    @property
    def load_factor(self) -> float:
        return self.cached / self.load.num_embeddings

    @property
    def cached_bytes(self) -> int:
        return self.cached * self.traffic.row_bytes


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The planned caches of several tables, keyed by table name.

    ``batch_size`` is the number of samples per step over all ranks. ``is_full`` is True if memory
    was too small to cache all rows worth caching.
    """

    tables: Mapping[str, CachedTable]
    batch_size: int
    optimizer: str
    is_full: bool = False

    @classmethod
    def of(
        cls,
        loads: Mapping[str, TableLoad],
        cached: Mapping[str, int],
        *,
        batch_size: int,
        optimizer: str,
        held: float = 0,
    ) -> CachePlan:
        """Return a plan for given cache sizes.

        Args:
            loads: the tables and how often their rows are read, keyed by table name.
            cached: number of most read rows to cache, keyed by table name.
            batch_size: samples per step over all ranks.
            optimizer: ``sgd`` or ``rowwise_adagrad``.
            held: number of preceding batches whose rows are still in the cache memory when a batch
                is fetched: 0 without lookahead, 1 with lookahead.
        """
        tables = {}
        for name, load in loads.items():
            rows, kept = BatchRows(load, batch_size), cached.get(name, 0)
            moved = TableTraffic(
                lookups=rows.lookups,
                unique_rows=rows.unique,
                misses=rows.missed(kept, held),
                row_bytes=row_bytes(load.embedding_dim, optimizer),
                weight_bytes=row_bytes(load.embedding_dim, "sgd"),
            )
            tables[name] = CachedTable(load, kept, moved)
        return cls(tables, batch_size, optimizer)

    @classmethod
    def within(
        cls,
        loads: Mapping[str, TableLoad],
        num_bytes: float | None,
        *,
        batch_size: int,
        optimizer: str,
        held: float = 0,
    ) -> CachePlan:
        """Return the plan that saves the most traffic with caches of at most ``num_bytes``.

        ``num_bytes`` is the total over all tables and ranks. None caches every row that is read
        more than once in 10,000 steps. ``of`` describes the other arguments.
        """
        order = row_order(loads, optimizer)
        useful = order.useful(STEPS * batch_size)
        place = useful if num_bytes is None else min(useful, order.fitting(num_bytes))
        plan = cls.of(
            loads,
            dict(zip(loads, order.rows(place), strict=True)),
            batch_size=batch_size,
            optimizer=optimizer,
            held=held,
        )
        return replace(plan, is_full=place < useful)

    def statistics(self, table: str) -> AccessStatistics:
        """Return the cache statistics of a table, for TorchRec's ``CacheParams.stats``."""
        from recd_plugin_scars.planning.statistics import AccessStatistics

        return AccessStatistics(self.tables[table].load, self.batch_size)

    @property
    def cached_bytes(self) -> int:
        """Return the total bytes of the caches over all tables and ranks."""
        return sum(table.cached_bytes for table in self.tables.values())


def row_order(loads: Mapping[str, TableLoad], optimizer: str) -> RowOrder:
    """Sort the rows of all tables by the traffic saved per byte of cache, with optimizer state."""
    widths = [row_bytes(load.embedding_dim, optimizer) for load in loads.values()]
    return RowOrder(list(loads.values()), widths)
