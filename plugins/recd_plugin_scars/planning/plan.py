"""Plans of caches: the rows of several tables that share a fast memory."""

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
    """The cache of one table.

    Attributes:
        cached: number of most read rows that stay in fast memory.
        traffic: traffic per step over all ranks.
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
    """The caches of several tables, for steps of ``batch_size`` samples over all ranks.

    ``is_full`` tells whether further useful rows would not fit into the given memory.
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
            loads: loads of the tables, by name.
            cached: number of most read rows that stay in fast memory, by table.
            batch_size: samples of all ranks.
            optimizer: ``sgd`` or ``rowwise_adagrad``.
            held: batches whose rows are in fast memory when the next batch's rows are fetched: 0
                without lookahead, 1 with it.
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
        """Return a plan that caches the useful rows that save most traffic within ``num_bytes``.

        ``num_bytes`` is for all tables and ranks; None caches all useful rows. See ``of`` for the
        other arguments.
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
        """Return ``CacheParams.stats`` of a table for TorchRec's planner."""
        from recd_plugin_scars.planning.statistics import AccessStatistics

        return AccessStatistics(self.tables[table].load, self.batch_size)

    @property
    def cached_bytes(self) -> int:
        """Return the bytes of all rows that stay in fast memory."""
        return sum(table.cached_bytes for table in self.tables.values())


def row_order(loads: Mapping[str, TableLoad], optimizer: str) -> RowOrder:
    """Return the order of rows, where a cached row includes its optimizer state."""
    widths = [row_bytes(load.embedding_dim, optimizer) for load in loads.values()]
    return RowOrder(list(loads.values()), widths)
