"""What a plan of caches says: rows of each table, and the traffic that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recd_plugin_scars.planning.load import Policy, TableLoad, TableTraffic, row_bytes, traffic
from recd_plugin_scars.planning.order import RowOrder

if TYPE_CHECKING:
    from recd_plugin_scars.planning.statistics import AccessStatistics

#: Steps in which a row that is worth caching is read more than once, unless told otherwise.
STEPS = 10_000


@dataclass(frozen=True, eq=False)
class CachedTable:
    """The cache of one table.

    Attributes:
        load: what its lookups read.
        cached: rows that stay in the fast memory, the most read ones.
        useful: rows beyond which caching saves nothing worth having; None: not known.
        traffic: of a step of all ranks.
    """

    load: TableLoad
    cached: int
    useful: int | None
    traffic: TableTraffic

    @property
    def load_factor(self) -> float:
        """Cached rows over all."""
        return self.cached / self.load.num_embeddings

    @property
    def cached_bytes(self) -> int:
        """Bytes of the fast memory, for rows that stay."""
        return self.cached * self.traffic.row_bytes

    @cached_property
    def hot_rows(self) -> NDArray[np.int64]:
        """The ids of the cached rows, int64 ``[cached]``, most read first."""
        return self.load.hot_rows(self.cached)


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The caches of some tables.

    Attributes:
        tables: by name.
        batch_size: samples of a step of all ranks.
        optimizer: ``sgd`` or ``rowwise_adagrad``.
    """

    tables: Mapping[str, CachedTable]
    batch_size: int
    optimizer: str

    @classmethod
    def of(
        cls,
        loads: Mapping[str, TableLoad],
        cached: Mapping[str, int],
        *,
        batch_size: int,
        optimizer: str,
        useful: Mapping[str, int] | None = None,
        held: float = 0,
        policy: Policy = "static",
    ) -> CachePlan:
        """A plan of given sizes; ``traffic`` describes the other arguments."""
        moved = traffic(
            list(loads.values()),
            cached,
            batch_size=batch_size,
            optimizer=optimizer,
            held=held,
            policy=policy,
        )
        tables = {
            name: CachedTable(
                load, cached.get(name, 0), None if useful is None else useful[name], moved[name]
            )
            for name, load in loads.items()
        }
        return cls(tables, batch_size, optimizer)

    @classmethod
    def within(
        cls,
        loads: Mapping[str, TableLoad],
        num_bytes: float | None,
        *,
        batch_size: int,
        optimizer: str,
        steps: int = STEPS,
        held: float = 0,
        policy: Policy = "static",
    ) -> CachePlan:
        """The useful rows that save most traffic in fast memory, whatever their tables' widths.

        Args:
            loads: of the tables, by name.
            num_bytes: of the rows that stay, of all tables and ranks together; None caches all
                useful rows.
            batch_size: samples of a step of all ranks.
            optimizer: ``sgd`` or ``rowwise_adagrad``, whose state is cached too.
            steps: a useful row is read more than once in so many.
            held: see ``traffic``; ``policy`` likewise.
        """
        order = row_order(loads, optimizer)
        useful = order.useful(steps * batch_size)
        place = useful if num_bytes is None else min(useful, order.fitting(num_bytes))
        return cls.of(
            loads,
            dict(zip(loads, order.rows(place), strict=True)),
            batch_size=batch_size,
            optimizer=optimizer,
            useful=dict(zip(loads, order.rows(useful), strict=True)),
            held=held,
            policy=policy,
        )

    def statistics(self, table: str) -> AccessStatistics:
        """What TorchRec's planner asks of ``CacheParams.stats``."""
        from recd_plugin_scars.planning.statistics import AccessStatistics

        return AccessStatistics(self.tables[table].load, self.batch_size)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the fast memory, for rows that stay."""
        return sum(table.cached_bytes for table in self.tables.values())


def row_order(loads: Mapping[str, TableLoad], optimizer: str) -> RowOrder:
    """The rows of tables whose optimizer state is cached with them."""
    widths = [row_bytes(load.embedding_dim, optimizer) for load in loads.values()]
    return RowOrder(list(loads.values()), widths)
