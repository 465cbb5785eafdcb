"""The rows of several tables in one order, most sent first, without being merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import rows_sent
from recd_plugin_flexshard.planning.demand import TableDemand

# Sums are kept for every so many bins; what lies between is added up when it is asked for.
_BLOCK = 8192


@dataclass(frozen=True)
class Prefix:
    """The first rows of a ranking: so many of each table.

    ``scalars``: their elements. ``sent``: elements that are sent for them to a rank in a step.
    """

    rows: tuple[int, ...]
    scalars: float
    sent: float

    @cached_property
    def num_rows(self) -> int:
        return sum(self.rows)


class TableRanking:
    """The rows of one table in bins of equal ``w`` (``costs.rows_sent``), non-increasing."""

    def __init__(self, demand: TableDemand, batch_size: int, coalesce: bool) -> None:
        self.dim = demand.embedding_dim
        self.num_rows = demand.num_embeddings
        tail = [demand.tail_probability] if demand.tail_rows else []
        known = len(demand.probabilities)
        self._keys = np.empty(known + len(tail))
        factor = demand.dedupe_factor
        self._keys[:known] = rows_sent(demand.probabilities, batch_size, factor, coalesce)
        self._keys[known:] = rows_sent(np.array(tail), batch_size, factor, coalesce)
        self._known = known
        self._ends: NDArray[np.int64] | None = None
        if demand.repeats is not None:
            repeats = np.append(demand.repeats, [demand.tail_rows] if tail else [])
            self._ends = np.concatenate([[0], np.cumsum(repeats)]).astype(np.int64)
            self._repeats = np.diff(self._ends)
        self._sums = np.zeros(len(self._keys) // _BLOCK + 1)
        for block in range(1, len(self._sums)):
            self._sums[block] = self._sum((block - 1) * _BLOCK, block * _BLOCK)
        np.cumsum(self._sums, out=self._sums)
        self.num_bins = len(self._keys)
        self.largest = float(self._keys[0]) if self.num_bins else 0.0

    def _rows_before(self, bins: int) -> int:
        if self._ends is not None:
            return int(self._ends[bins])
        return bins if bins <= self._known else self.num_rows

    def _sum(self, start: int, stop: int) -> float:
        keys = self._keys[start:stop]
        if self._ends is not None:
            return float(keys @ self._repeats[start:stop])
        rows = self._rows_before(stop) - self._rows_before(start)
        # All bins are of one row, but for the tail at the end.
        return float(keys.sum()) + (float(keys[-1]) * (rows - len(keys)) if len(keys) else 0.0)

    def bins_above(self, sent: float) -> int:
        """How many bins have a ``w`` above ``sent``."""
        return self.num_bins - int(np.searchsorted(self._keys[::-1], sent, side="right"))

    def rows_above(self, sent: float) -> int:
        return self._rows_before(self.bins_above(sent))

    def bin_of(self, row: int) -> int:
        """The bin of the row at rank ``row``, which is below the number of rows."""
        if self._ends is not None:
            return int(np.searchsorted(self._ends, row, side="right")) - 1
        return min(row, self._known)

    def key(self, row: int) -> float:
        """The ``w`` of the row at rank ``row``."""
        return float(self._keys[self.bin_of(row)])

    def sent(self, rows: int) -> float:
        """The sum of ``w`` over the first ``rows`` rows."""
        bins = self.num_bins if rows == self.num_rows else self.bin_of(rows)
        block = bins // _BLOCK
        total = float(self._sums[block]) + self._sum(block * _BLOCK, bins)
        part = rows - self._rows_before(bins)
        return total + part * float(self._keys[bins]) if part else total


class Ranking:
    """Rows of ``tables`` by how often a batch of a rank has them sent; of equals the first table's.

    Cuts are thresholds, which are looked up in each table, so no list of all rows is made.
    """

    def __init__(self, tables: Sequence[TableDemand], batch_size: int, coalesce: bool) -> None:
        self.tables = tuple(TableRanking(table, batch_size, coalesce) for table in tables)
        #: Elements that a batch of a rank looks up, and those without deduplication.
        self.lookups, self.plain_lookups = 0.0, 0.0
        for table in tables:
            elements = table.embedding_dim * batch_size * table.length
            self.lookups += elements / table.dedupe_factor
            self.plain_lookups += elements
        self._above: dict[float, Prefix] = {}
        self.nothing = self.prefix([0] * len(self.tables))
        self.everything = self.prefix([table.num_rows for table in self.tables])

    def prefix(self, rows: Sequence[int]) -> Prefix:
        """The first ``rows`` of each table."""
        counted = list(zip(self.tables, rows, strict=True))
        return Prefix(
            tuple(rows),
            scalars=float(sum(table.dim * n for table, n in counted)),
            sent=sum(table.dim * table.sent(n) for table, n in counted),
        )

    def above(self, sent: float) -> Prefix:
        """The rows that are sent more often than ``sent`` times."""
        # Bisections ask for the same ones again and again.
        if sent not in self._above:
            self._above[sent] = self.prefix([table.rows_above(sent) for table in self.tables])
        return self._above[sent]

    def first(self, num_rows: int) -> Prefix:
        """The first ``num_rows`` of all rows."""
        return self.longest(lambda prefix: prefix.num_rows <= num_rows)

    def last_key(self, prefix: Prefix) -> float:
        """How often the last row of ``prefix``, which has one, is sent."""
        return min(
            table.key(n - 1) for table, n in zip(self.tables, prefix.rows, strict=True) if n > 0
        )

    def next_key(self, prefix: Prefix) -> float:
        """How often the first row that is not in ``prefix`` is sent; 0 where none is left."""
        left = zip(self.tables, prefix.rows, strict=True)
        return max((table.key(n) for table, n in left if n < table.num_rows), default=0.0)

    def longest(self, holds: Callable[[Prefix], bool], beyond: Prefix | None = None) -> Prefix:
        """The longest prefix for which ``holds``, which is so for all shorter ones too.

        ``beyond`` is known to hold, with all that are shorter.
        """
        start = beyond or self.nothing

        def reaches(prefix: Prefix) -> bool:
            return prefix.num_rows <= start.num_rows or holds(prefix)

        if reaches(self.everything):
            return self.everything
        # Floats that are not negative are ordered as the integers of their bits are.
        low, high = -1, _bits(max(table.largest for table in self.tables))
        while high - low > 1:
            middle = (low + high) // 2
            if reaches(self.above(_float(middle))):
                high = middle
            else:
                low = middle
        return self._with_ties(self.above(_float(high)), _float(high), reaches)

    def _with_ties(self, prefix: Prefix, sent: float, reaches: Callable[[Prefix], bool]) -> Prefix:
        """``prefix`` and as many of the rows that are sent ``sent`` times as hold, in order."""
        below = np.nextafter(sent, -1.0)
        for index, table in enumerate(self.tables):

            def taking(rows: int, taken: Prefix = prefix, index: int = index) -> Prefix:
                return self.prefix([*taken.rows[:index], rows, *taken.rows[index + 1 :]])

            low, high = prefix.rows[index], table.rows_above(below) + 1
            while high - low > 1:
                middle = (low + high) // 2
                if reaches(taking(middle)):
                    low = middle
                else:
                    high = middle
            prefix = taking(low)
            if low < table.rows_above(below):
                break
        return prefix


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
