"""Plans of caches: which rows of several tables share a fast memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from recd_plugin_scars.planning.load import BatchRows, TableLoad, TableTraffic, row_bytes

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
        widths = [row_bytes(load.embedding_dim, optimizer) for load in loads.values()]
        order = RowOrder(list(loads.values()), widths)
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


class RowOrder:
    """The rows of several tables, sorted by what caching them saves per byte of fast memory.

    A cached row saves its bytes times u, the probability that a batch reads it, so each byte saves
    u. As ``u = 1 - exp(-b * rate)`` with ``rate = -l * log(1 - P)``, the order is the same for all
    batch sizes. A ``place`` is a number of rows from the start of this order.
    """

    def __init__(self, loads: Sequence[TableLoad], row_bytes: Sequence[float]) -> None:
        segments = [load.segments for load in loads]
        with np.errstate(divide="ignore"):
            rates = [
                -load.lookups * np.log1p(-each.probabilities)
                for load, each in zip(loads, segments, strict=True)
            ]
        tables = [np.full(len(rate), index) for index, rate in enumerate(rates)]
        all_rates = np.concatenate(rates)
        order = np.argsort(-all_rates, kind="stable")
        self._rates = all_rates[order]
        self._tables = np.concatenate(tables)[order]
        self._row_bytes = np.asarray(row_bytes, dtype=np.float64)[self._tables]
        num_rows = np.concatenate([each.num_rows for each in segments])[order]
        self._ends = np.concatenate([[0], np.cumsum(num_rows)])
        self._byte_ends = np.concatenate([[0.0], np.cumsum(num_rows * self._row_bytes)])
        self._num_tables = len(loads)

    def rows(self, place: int) -> list[int]:
        """Return how many rows of each table come before ``place``."""
        segment = int(np.searchsorted(self._ends, place, "right")) - 1
        counts = np.bincount(
            self._tables[:segment],
            weights=np.diff(self._ends[: segment + 1]),
            minlength=self._num_tables,
        ).astype(np.int64)
        if part := place - int(self._ends[segment]):
            counts[self._tables[segment]] += part
        return [int(count) for count in counts]

    def fitting(self, num_bytes: float) -> int:
        """Return the largest place whose rows fit into ``num_bytes``."""
        segment = int(np.searchsorted(self._byte_ends, num_bytes, "right")) - 1
        if segment == len(self._row_bytes):
            return int(self._ends[-1])
        part = (num_bytes - self._byte_ends[segment]) // self._row_bytes[segment]
        return int(self._ends[segment]) + int(part)

    def useful(self, samples: float) -> int:
        """Return the number of rows expected to be read more than once by ``samples``."""
        return int(self._ends[np.searchsorted(-self._rates, -1 / samples, "left")])
