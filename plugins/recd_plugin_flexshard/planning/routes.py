"""Where the accesses of a table go: to which tier, and from which rank's shard they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.cluster import ClusterShape
from recd_plugin_flexshard.planning.demand import TableDemand
from recd_plugin_flexshard.planning.plan import TableTiers, TierPlan

Ids = NDArray[np.int64]
Rates = NDArray[np.float64]

# Rows that are looked at together: their arrays stay small beside those of a table.
_CHUNK = 1 << 22


class TableRoute:
    """The places of one table's rows.

    Counts by place are arrays ``[2 + ranks_per_node, world_size]``. Its lines are the tiers: hot,
    the flex rows of each rank of a node, cold. Its columns are the ranks that hold the row in the
    table itself, which TorchRec's row-wise sharding cuts into blocks of ``ceil(E / U)`` rows.

    Args:
        tiers: of the table.
        cluster: U ranks, W of them a node.
        first_flex: flex rows of the tables before this one: those of all tables are dealt to the
            ranks of a node in turns, most accessed first.
        coalesced: whether each id is sent once a batch.
    """

    def __init__(
        self, tiers: TableTiers, cluster: ClusterShape, first_flex: int, coalesced: bool = False
    ) -> None:
        self.tiers = tiers
        self.coalesced = coalesced
        self.shape = (2 + cluster.ranks_per_node, cluster.world_size)
        self._ranks_per_node = cluster.ranks_per_node
        self._first_flex = first_flex
        rows = np.concatenate([tiers.hot_rows, tiers.flex_rows])
        order = np.argsort(rows, kind="stable")
        dealt = 1 + (first_flex + np.arange(tiers.flex)) % cluster.ranks_per_node
        lines = np.concatenate([np.zeros(tiers.hot, np.int64), dealt])
        # An id beyond the last of them is compared with one that is none.
        self._sorted = np.append(rows[order], np.iinfo(np.int64).max)
        self._lines = np.append(lines[order], self._cold)

    @property
    def _cold(self) -> int:
        return self.shape[0] - 1

    @property
    def block(self) -> int:
        """Rows of a shard; of the last ones fewer."""
        return -(-self.tiers.demand.num_embeddings // self.shape[1])

    def rows_held(self) -> NDArray[np.int64]:
        """Rows of the table in the shard of each rank."""
        starts = np.arange(self.shape[1]) * self.block
        return np.clip(self.tiers.demand.num_embeddings - starts, 0, self.block)

    def flex_rows_held(self) -> NDArray[np.int64]:
        """Flex rows of each rank of a node."""
        first = (np.arange(self._ranks_per_node) - self._first_flex) % self._ranks_per_node
        return np.maximum(-(-(self.tiers.flex - first) // self._ranks_per_node), 0)

    def counts(self, ids: Ids) -> NDArray[np.int64]:
        """How many of ``ids`` are of each place."""
        return self._by_place(self._lines_of(ids), ids)

    def rates(
        self, demand: TableDemand, of: Callable[[Rates], Rates] = np.asarray
    ) -> NDArray[np.float64]:
        """Mean accesses of one sample to the rows of each place, by a demand on this table.

        Args:
            demand: on this table.
            of: what to sum, of the mean accesses to each row; the accesses themselves without it.
        """
        rates = np.zeros(self.shape)
        left = self._by_place(self._lines[:-1], self._sorted[:-1])
        left[self._cold] = self.rows_held() - left.sum(0)
        for rows, probabilities in _known(demand):
            lines = self._lines_of(rows)
            rates += self._by_place(lines, rows, of(probabilities))
            left -= self._by_place(lines, rows)
        return rates + left * of(np.array([demand.tail_probability]))

    def _lines_of(self, ids: Ids) -> Ids:
        found = np.searchsorted(self._sorted, ids)
        return np.where(self._sorted[found] == ids, self._lines[found], self._cold)

    def _by_place(
        self, lines: Ids, rows: Ids, weights: NDArray[np.float64] | None = None
    ) -> NDArray[Any]:
        lines_and_ranks = lines * self.shape[1] + rows // self.block
        counts = np.bincount(lines_and_ranks, weights, minlength=self.shape[0] * self.shape[1])
        return counts.reshape(self.shape)


def routes_of(plan: TierPlan) -> list[TableRoute]:
    """The routes of the tables of ``plan``, as one EmbeddingCollection has them, in their order."""
    first, routes = 0, []
    for table in plan.tables:
        routes.append(TableRoute(table, plan.cluster, first, plan.options.coalesce))
        first += table.flex
    return routes


def _known(demand: TableDemand) -> Iterator[tuple[Ids, NDArray[np.float64]]]:
    """Rows that are known one by one, and their probabilities, some at a time."""
    ends, known = None, len(demand.probabilities)
    if demand.repeats is not None:
        ends = np.cumsum(demand.repeats)
        known = int(ends[-1]) if len(ends) else 0
    for start in range(0, known, _CHUNK):
        stop = min(start + _CHUNK, known)
        rows = demand.ids(start, stop)
        if ends is None:
            yield rows, demand.probabilities[start:stop]
        else:
            bins = np.searchsorted(ends, np.arange(start, stop), side="right")
            yield rows, demand.probabilities[bins]
