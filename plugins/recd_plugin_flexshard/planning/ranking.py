"""The rows of several tables in one order, most sent first, without being merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import rows_sent
from recd_plugin_flexshard.planning.demand import TableDemand
from recd_plugin_flexshard.planning.sync import CopyGroup, log_missed

# Sums are kept for every so many bins; what lies between is added up when it is asked for.
_BLOCK = 8192
# Of a row by one batch, that are not told from more.
_MOST_REPEATS = 1e4
_Measure = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Prefix:
    """The first rows of a ranking: so many of each table.

    ``scalars``: their elements. ``sent``: elements that are sent for them to a rank in a step.
    ``exchanged``: elements that an all-reduce has which sends as much as a sparse sync of them, by
    each group of the ranking.
    """

    rows: tuple[int, ...]
    scalars: float
    sent: float
    exchanged: tuple[float, ...] = ()

    @cached_property
    def num_rows(self) -> int:
        return sum(self.rows)


class TableRanking:
    """The rows of one table in bins of equal ``w`` (``costs.rows_sent``), non-increasing."""

    def __init__(
        self,
        demand: TableDemand,
        batch_size: int,
        coalesce: bool,
    ) -> None:
        self.dim = demand.embedding_dim
        self.num_rows = demand.num_embeddings
        tail = [demand.tail_probability] if demand.tail_rows else []
        known = len(demand.probabilities)
        self._keys = np.empty(known + len(tail))
        factor = demand.dedupe_factor
        rows = demand.independent_rows(batch_size) if coalesce else batch_size
        self._keys[:known] = rows_sent(demand.probabilities, rows, factor, coalesce)
        self._keys[known:] = rows_sent(np.array(tail), rows, factor, coalesce)
        self._known = known
        self._ends: NDArray[np.int64] | None = None
        if demand.repeats is not None:
            repeats = np.append(demand.repeats, [demand.tail_rows] if tail else [])
            self._ends = np.concatenate([[0], np.cumsum(repeats)]).astype(np.int64)
            self._repeats = np.diff(self._ends)
        self._sums = self._block_sums(np.asarray)
        # Of so many rows: one prefix after the other differs in a few tables.
        self._sent: dict[int, float] = {}
        self._exchanged_of: dict[int, list[float]] = {}
        self._coalesce = coalesce
        self._exchanged: list[tuple[_Measure, NDArray[np.float64]]] = []
        self.num_bins = len(self._keys)
        self.largest = float(self._keys[0]) if self.num_bins else 0.0

    def _rows_before(self, bins: int) -> int:
        if self._ends is not None:
            return int(self._ends[bins])
        return bins if bins <= self._known else self.num_rows

    def _block_sums(self, of: _Measure) -> NDArray[np.float64]:
        sums = np.zeros(len(self._keys) // _BLOCK + 1)
        for block in range(1, len(sums)):
            sums[block] = self._sum((block - 1) * _BLOCK, block * _BLOCK, of)
        return np.cumsum(sums, out=sums)

    def _sum(self, start: int, stop: int, of: _Measure) -> float:
        keys = of(self._keys[start:stop])
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
        if rows not in self._sent:
            self._sent[rows] = self._total(rows, self._sums, np.asarray)
        return self._sent[rows]

    def exchanged(self, rows: int) -> list[float]:
        """The sum of ``CopyGroup.exchanged`` over the first ``rows`` rows, of each group."""
        if rows not in self._exchanged_of:
            found = [self._total(rows, sums, of) for of, sums in self._exchanged]
            self._exchanged_of[rows] = found
        return self._exchanged_of[rows]

    def know(self, groups: Sequence[CopyGroup]) -> None:
        """Have ``exchanged`` tell of ``groups``."""
        each = [partial(group.exchanged, coalesce=self._coalesce) for group in groups]
        self._exchanged = [(of, self._block_sums(of)) for of in each]
        self._exchanged_of.clear()

    def touched(self, repeats: float) -> float:
        """Rows that a batch has, where so many accesses of a row come together."""

        def of(keys: NDArray[np.float64]) -> NDArray[np.float64]:
            return -np.expm1(log_missed(keys, self._coalesce) / repeats)

        return self._total(self.num_rows, self._block_sums(of), of)

    def _total(self, rows: int, sums: NDArray[np.float64], of: _Measure) -> float:
        bins = self.num_bins if rows == self.num_rows else self.bin_of(rows)
        block = bins // _BLOCK
        total = float(sums[block]) + self._sum(block * _BLOCK, bins, of)
        part = rows - self._rows_before(bins)
        return total + part * float(of(self._keys[bins : bins + 1])[0]) if part else total


class Ranking:
    """Rows of ``tables`` by how often a batch of a rank has them sent; of equals the first table's.

    Cuts are thresholds, which are looked up in each table, so no list of all rows is made.
    ``groups``: of which ``Prefix.exchanged`` is to be known.
    """

    def __init__(
        self,
        tables: Sequence[TableDemand],
        batch_size: int,
        coalesce: bool,
        groups: Sequence[CopyGroup] = (),
    ) -> None:
        self.tables = tuple(TableRanking(table, batch_size, coalesce) for table in tables)
        repeats = 1.0
        if groups and not coalesce:  # else what is sent has it already
            repeats = _repeats(list(zip(self.tables, tables, strict=True)), batch_size)
        self.groups = tuple(replace(group, repeats=repeats) for group in groups)
        for ranked in self.tables:
            ranked.know(self.groups)
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
        exchanged = [[table.dim * sum_ for sum_ in table.exchanged(n)] for table, n in counted]
        return Prefix(
            tuple(rows),
            scalars=float(sum(table.dim * n for table, n in counted)),
            sent=sum(table.dim * table.sent(n) for table, n in counted),
            exchanged=tuple(map(sum, zip(*exchanged, strict=True))),
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
        low, high = -1, float_bits(max(table.largest for table in self.tables))
        while high - low > 1:
            middle = (low + high) // 2
            if reaches(self.above(bits_float(middle))):
                high = middle
            else:
                low = middle
        return self._with_ties(self.above(bits_float(high)), bits_float(high), reaches)

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


def _repeats(tables: list[tuple[TableRanking, TableDemand]], batch_size: int) -> float:
    """How many accesses of a row come together, by the distinct ids that were counted.

    One number for all tables, as one order of their rows is.
    """
    known = [(ranked, demand) for ranked, demand in tables if demand.distinct is not None]
    counted = sum(
        demand.embedding_dim * demand.distinct.of(batch_size)
        for _, demand in known
        if demand.distinct is not None
    )
    low, high = 0.0, log(_MOST_REPEATS)
    if counted <= 0:
        return 1.0
    for _ in range(16):
        middle = (low + high) / 2
        touched = sum(ranked.dim * ranked.touched(exp(middle)) for ranked, _ in known)
        low, high = (middle, high) if touched > counted else (low, middle)
    return exp(low)


def float_bits(value: float) -> int:
    """The bits of a float that is not negative, which are ordered as floats are."""
    return int(np.float64(value).view(np.int64))


def bits_float(bits: int) -> float:
    """The float with these bits."""
    return float(np.int64(bits).view(np.float64))
