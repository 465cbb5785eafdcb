"""Search for the number of hot and flex rows (FlexShard, arXiv 2301.02959, section 4).

Rows are sorted by access frequency: hot rows (copied to every rank) first, then flex rows (copied
to every node), then cold rows (not copied).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import (
    SCALAR_BYTES,
    ClusterShape,
    CollectiveSeconds,
    Copies,
    CopyGroup,
    CostOptions,
    Floats,
    RowCosts,
    Sync,
    Syncs,
    TableDemand,
    rows_sent,
)
from recd_plugins.api import SetupError

# Relative rounding of sums over all rows.
_ROUNDING = 1e-10
# Upper bound on the estimated mean accesses to a row per batch.
_MOST_REPEATS = 1e4
# Rounding to integers may shift the optimum, so numbers of hot rows near it are tried, too.
_TRIED, _SPREAD = 12, 16


@dataclass(frozen=True)
class Prefix:
    """The first ``num_rows`` rows of a ``Ranking`` (rows sorted by frequency), and their costs.

    Attributes:
        num_rows: number of rows.
        scalars: sum of the rows' embedding dimensions.
        sent: scalars that are sent for these rows in a batch of one rank.
        exchanged: pair of gradient scalars that a sync of accessed rows exchanges: with a copy of
            the rows on every rank, and with a copy on every node.
    """

    num_rows: int
    scalars: float
    sent: float
    exchanged: tuple[float, float] = (0.0, 0.0)


class Ranking:
    """Rows of several tables, sorted by ``w``, largest first.

    ``w`` is the mean number of times that a row is sent in a batch of one rank. Rows of one table
    with equal ``w`` form a bin.
    """

    def __init__(
        self,
        tables: Sequence[TableDemand],
        batch_size: int,
        coalesce: bool,
        groups: tuple[CopyGroup, CopyGroup] | None = None,
    ) -> None:
        self.num_tables = len(tables)
        keys, rows = [], []
        for table in tables:
            probabilities, repeats = table.bins()
            size = table.independent_rows(batch_size) if coalesce else batch_size
            keys.append(rows_sent(probabilities, size, table.dedupe_factor, coalesce))
            rows.append(repeats)
        lengths = [len(each) for each in keys]
        merged = np.concatenate(keys)
        order = np.argsort(-merged, kind="stable")
        self.keys, self.rows = merged[order], np.concatenate(rows)[order]
        self.table = np.repeat(np.arange(len(tables)), lengths)[order]
        self.dims = np.array([table.embedding_dim for table in tables])[self.table]
        self._coalesce = coalesce
        if groups is not None and not coalesce:  # otherwise the sent rows include the repeats
            repeats_ = _repeats(tables, batch_size, keys)
            groups = (replace(groups[0], repeats=repeats_), replace(groups[1], repeats=repeats_))
        self.groups = groups
        self._ends = np.cumsum(self.rows)
        ones = np.ones(len(self.keys))
        per_row = [ones, self.keys, *(self.exchanged(group) for group in groups or ())]
        # Values per element of a row in each bin, and their sums over all preceding bins.
        self._per_scalar = per_row
        elements = self.rows * self.dims
        self._sums = [np.concatenate([[0.0], np.cumsum(elements * each)]) for each in per_row]
        #: Elements that a batch of one rank looks up, with and without deduplication.
        plain = [table.embedding_dim * batch_size * table.length for table in tables]
        self.plain_lookups = float(sum(plain))
        self.lookups = sum(
            each / table.dedupe_factor for each, table in zip(plain, tables, strict=True)
        )
        self.everything = self.first(int(self._ends[-1]))

    def exchanged(self, group: CopyGroup) -> Floats:
        """Return the bytes of a sparse sync divided by an all-reduce, per row, ``[num_bins]``."""
        return group.exchanged(self.keys, self._coalesce)

    def first(self, num_rows: int) -> Prefix:
        """Return the first ``num_rows`` rows of the ranking, or all rows if there are fewer."""
        num_rows = min(num_rows, int(self._ends[-1]))
        bins, rest = self._place(num_rows)
        sums = [float(total[bins]) for total in self._sums]
        if rest:
            elements = rest * int(self.dims[bins])
            pairs = zip(sums, self._per_scalar, strict=True)
            sums = [total + elements * float(each[bins]) for total, each in pairs]
        scalars, sent, *exchanged = sums
        return Prefix(num_rows, scalars, sent, tuple(exchanged) or (0.0, 0.0))  # type: ignore[arg-type]

    def _place(self, num_rows: int) -> tuple[int, int]:
        """Return the number of full bins in the first ``num_rows`` rows, and the remaining rows."""
        bins = int(np.searchsorted(self._ends, num_rows, side="right"))
        return bins, num_rows - (int(self._ends[bins - 1]) if bins else 0)

    def key(self, row: int) -> float:
        """Return the mean sends per batch of the row at index ``row``; 0 past the end."""
        bins, _ = self._place(row)
        return float(self.keys[bins]) if bins < len(self.keys) else 0.0

    def by_table(self, values: Floats, stop: Prefix, start: Prefix | None = None) -> list[float]:
        """Return the sum of ``values`` over the rows between ``start`` and ``stop`` in each table.

        Args:
            values: value of one row of each bin, float64 ``[num_bins]``.
            stop: end of the range of rows.
            start: begin of the range of rows; None starts at the first row.
        """
        first = start.num_rows if start else 0
        before = self._ends - self.rows
        last = int(np.searchsorted(before, stop.num_rows))
        bins = slice(self._place(first)[0], last)
        counted = np.minimum(self._ends[bins], stop.num_rows) - np.maximum(before[bins], first)
        weights = counted * values[bins]
        sums: list[float] = (
            np.bincount(self.table[bins], weights, minlength=self.num_tables).astype(float).tolist()
        )
        return sums

    def while_true(self, holds: NDArray[np.bool_]) -> Prefix:
        """Return the rows before the first bin whose element of ``holds`` is False.

        ``holds`` is bool ``[num_bins]``.
        """
        bins = len(holds) if holds.all() else int(np.argmin(holds))
        return self.first(int(self._ends[bins - 1]) if bins else 0)

    def longest(self, holds: Callable[[Prefix], bool], beyond: Prefix | None = None) -> Prefix:
        """Return the longest prefix for which ``holds`` is True, by bisection.

        ``holds`` must be True up to some number of rows, and False for all longer prefixes. It must
        be True for ``beyond``, where the search starts (None: no rows).
        """
        if holds(self.everything):
            return self.everything
        low, high = beyond.num_rows if beyond else 0, self.everything.num_rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(self.first(middle)) else (low, middle)
        return self.first(low)


def _repeats(tables: Sequence[TableDemand], batch_size: int, keys: Sequence[Floats]) -> float:
    """Estimate the mean number of accesses to a row by a batch that accesses the row.

    Uses measured distinct ids per batch, or returns 1. ``keys``: sends per batch of each row.
    """
    known = [
        (table, w, table.bins()[1])
        for table, w in zip(tables, keys, strict=True)
        if table.distinct is not None
    ]
    counted = sum(
        table.embedding_dim * table.distinct.of(batch_size)
        for table, _, _ in known
        if table.distinct is not None
    )
    if counted <= 0:
        return 1.0
    low, high = 0.0, log(_MOST_REPEATS)
    for _ in range(16):
        middle = (low + high) / 2
        touched = sum(
            table.embedding_dim * float(-np.expm1(-w / exp(middle)) @ rows)
            for table, w, rows in known
        )
        low, high = (middle, high) if touched > counted else (low, middle)
    return exp(low)


@dataclass(frozen=True)
class Cuts:
    """Two prefixes of the rows of a table, which are sorted by frequency, most frequent first.

    Rows in ``hot`` are copied to every rank. Rows in ``flex`` but not in ``hot`` are copied to
    every node.
    """

    hot: Prefix
    flex: Prefix


@dataclass(frozen=True)
class CutModel:
    """Finds the best number of rows to copy to every rank or node within the memory budget.

    Time and memory of a row are proportional to its embedding dimension. Therefore, rows of
    different tables can be compared by how often they are sent.
    """

    ranking: Ranking
    cluster: ClusterShape
    options: CostOptions
    syncs: Syncs | None = None

    @cached_property
    def costs(self) -> RowCosts:
        return RowCosts.of(self.cluster, self.options)

    @cached_property
    def budget(self) -> float:
        """Return the memory budget of a rank for tables and activations, in bytes."""
        if self.options.memory_bytes is not None:
            return self.options.memory_bytes
        return self.options.memory_ratio * self.plain_memory

    @cached_property
    def plain_memory(self) -> float:
        """Return the bytes per rank with TorchRec's row-wise sharding, without deduplication."""
        lookups = self.ranking.plain_lookups
        static = self.costs.row_wise_static * self.ranking.everything.scalars
        return static + self.options.plain.activation_bytes(lookups, lookups)

    def memory(self, cuts: Cuts) -> float:
        """Return the bytes per rank for tables, row copies and activations."""
        costs, hot, everything = self.costs, cuts.hot, self.ranking.everything
        return (
            costs.row_wise_static * everything.scalars
            + self.options.activation_bytes(self.ranking.lookups, everything.sent)
            + (costs.hot_static - costs.row_wise_static) * hot.scalars
            - costs.saved * hot.sent
            + (costs.flex_static - costs.row_wise_static) * (cuts.flex.scalars - hot.scalars)
        )

    def fits(self, hot: Prefix, flex: Prefix | None = None) -> bool:
        return self.memory(Cuts(hot, flex or hot)) <= self.budget * (1 + _ROUNDING)

    def seconds(self, cuts: Cuts) -> CollectiveSeconds:
        """Return the seconds per step in each collective (FlexShard, table 6)."""
        by, options = self.cluster.collectives, self.options
        cold = options.row_wise_bytes * _sent(cuts.flex, self.ranking.everything)
        hot, flex = self.copies(cuts)
        syncs = self.syncs_of(cuts)
        return CollectiveSeconds(
            a2a_global=by.a2a_global.seconds_for(cold),
            a2a_intra=by.a2a_intra.seconds_for(options.flex_bytes * _sent(cuts.hot, cuts.flex)),
            ar_global=hot.seconds(syncs.hot),
            ar_cross=flex.seconds(syncs.flex),
        )

    def copies(self, cuts: Cuts) -> tuple[Copies, Copies]:
        """Return one rank's copies of hot rows (copied to every rank) and flex rows (to nodes)."""
        by, node, wire = (
            self.cluster.collectives,
            self.cluster.ranks_per_node,
            self.options.wire_bytes,
        )
        (hot_group, flex_group), hot, flex = self.groups, cuts.hot, cuts.flex
        reduced, rows = SCALAR_BYTES * hot.scalars, (flex.num_rows - hot.num_rows) / node
        shard = SCALAR_BYTES * (flex.scalars - hot.scalars) / node
        touched = max(0.0, flex.exchanged[1] - hot.exchanged[1]) / node
        return (
            Copies(hot_group, by.ar_global, hot.num_rows, reduced, wire * hot.exchanged[0]),
            Copies(flex_group, by.ar_cross, rows, shard, wire * touched),
        )

    @cached_property
    def groups(self) -> tuple[CopyGroup, CopyGroup]:
        """Return the groups of ranks with the same hot rows, and with the same flex rows."""
        return self.ranking.groups or (CopyGroup.hot(self.cluster), CopyGroup.flex(self.cluster))

    def syncs_of(self, cuts: Cuts) -> Syncs:
        """Return how to sum gradients of copied rows: ``dense`` (all-reduce) or ``sparse``."""
        sync = self.options.sync
        if self.syncs is not None:
            return self.syncs
        if sync != "auto":
            return Syncs(sync, sync)
        hot, flex = (copies.cheapest(self.options.minimise) for copies in self.copies(cuts))
        return Syncs(hot, flex)

    @property
    def with_each_syncs(self) -> list[CutModel]:
        """Return a copy of this model for each allowed way to sum gradients of copied rows."""
        if self.syncs is not None or self.options.sync == "dense":
            return [self]
        each: tuple[Sync, ...] = ("dense", "sparse") if self.options.sync == "auto" else ("sparse",)
        return [replace(self, syncs=Syncs(hot, flex)) for hot in each for flex in each]

    def gradient_seconds(self, tier: Literal["hot", "flex"], sent: Floats) -> Floats:
        """Return the seconds to sum the gradient of one scalar of a copied row.

        Args:
            tier: ``hot`` for rows copied to every rank, ``flex`` for rows copied to every node.
            sent: how often a row of each bin is sent, float64 ``[num_bins]``.

        Returns:
            Seconds for each bin, float64 ``[num_bins]``.
        """
        group = self.groups[tier == "flex"]
        dense = self.costs.ar_global if tier == "hot" else self.costs.ar_cross
        if self.syncs is None or getattr(self.syncs, tier) == "dense" or group.members == 1:
            return np.full_like(sent, dense)
        everything = self.ranking.everything
        bits = group.bits(everything.num_rows / everything.scalars) / group.sent_of_reduced
        exchanged = self.options.wire_bytes * group.exchanged(sent, self.options.coalesce)
        return dense * (exchanged + bits) / SCALAR_BYTES

    def hot_in_time(self) -> Prefix:
        """Return the rows that take less time if copied to every rank than if not copied."""
        w = self.ranking.keys
        saved = w * self.costs.a2a_global - self.gradient_seconds("hot", w)
        return self.ranking.while_true(saved > 0)

    def flex_in_time(self) -> Prefix:
        """Return the rows that take less time if copied to every node than if not copied."""
        w = self.ranking.keys
        saved = w * (self.costs.a2a_global - self.costs.a2a_intra)
        return self.ranking.while_true(saved > self.gradient_seconds("flex", w))

    def hot_in_memory(self, under: float) -> Prefix:
        """Return the rows whose copies on every rank need less than ``under`` bytes per scalar.

        Counts the memory of the copies minus the activation memory that they save.
        """
        saved = self.costs.saved * self.ranking.keys
        return self.ranking.while_true(saved > self.costs.hot_static - under)

    @property
    def plain_seconds(self) -> CollectiveSeconds:
        """Return the seconds with TorchRec's row-wise sharding, without deduplication."""
        num_bytes = self.options.plain.row_wise_bytes * self.ranking.plain_lookups
        a2a = self.cluster.collectives.a2a_global.seconds_for(num_bytes)
        return CollectiveSeconds(a2a, 0.0, 0.0, 0.0)

    def a2a_reduction(self, cuts: Cuts) -> float:
        """Return the fraction of bytes that row copies save in the all-to-all over all ranks."""
        plain = self.options.plain.row_wise_bytes * self.ranking.plain_lookups
        saved = plain - self.options.row_wise_bytes * _sent(cuts.flex, self.ranking.everything)
        return saved / plain if saved > _ROUNDING * plain else 0.0

    @cached_property
    def hot_that_fit(self) -> tuple[Prefix, Prefix]:
        """Return the fewest and the most rows to copy to every rank within the memory budget.

        Assumes that no rows are copied to nodes.

        Raises:
            SetupError: no number of rows fits into the budget.
        """
        least = self.hot_in_memory(self.costs.row_wise_static)
        if not self.fits(least):
            needed = self.memory(Cuts(least, least))
            coalesced = "set coalesce: false, " if self.options.coalesce else ""
            raise SetupError(
                f"the tables need at least {needed:,.0f} bytes on each rank, but the budget is "
                f"{self.budget:,.0f} bytes (row-wise sharding needs {self.plain_memory:,.0f}). "
                f"Raise the option 'budget', {coalesced}use more ranks or a smaller batch size."
            )
        return self._fitting(least, self.fits)

    def _fitting(self, least: Prefix, fits: Callable[[Prefix], bool]) -> tuple[Prefix, Prefix]:
        """Return the shortest and the longest prefix for which ``fits`` is True.

        ``fits`` must be True for ``least``, the prefix that needs the least memory.
        """
        most = self.ranking.longest(fits, beyond=least)
        nothing = self.ranking.first(0)
        if fits(nothing):
            return nothing, most
        too_few = self.ranking.longest(
            lambda prefix: prefix.num_rows < least.num_rows and not fits(prefix)
        )
        return self.ranking.first(too_few.num_rows + 1), most

    def most_flex(self, hot: Prefix, last: Prefix) -> Cuts:
        """Return ``hot`` and the longest ``flex`` (at most ``last``) that the budget allows."""

        def allowed(flex: Prefix) -> bool:
            return flex.num_rows <= last.num_rows and self.fits(hot, flex)

        return Cuts(hot, self.ranking.longest(allowed, beyond=hot))

    def best(self, each: Iterable[Cuts]) -> Cuts:
        """Return the fastest of these cuts, or the one with less memory if two are equally fast."""
        overlap = 1 - self.options.exposed
        return min(each, key=lambda cuts: (self.seconds(cuts).exposed(overlap), self.memory(cuts)))

    def two_tier(self) -> Cuts:
        """Return the best number of rows to copy to every rank, with no rows copied to nodes.

        With the default options, this is the memory-neutral plan of the FlexShard paper, in its
        symbols: the largest K with ``K (M - a) <= c B cum_p(K)``.
        """
        hot = [_clip(each.hot_in_time(), self.hot_that_fit) for each in self.with_each_syncs]
        return self.best(Cuts(each, each) for each in hot)

    def three_tier(self) -> Cuts:
        """Return the hot rows whose copies save memory, and as many flex rows as also fit.

        With the default options, this is the memory-neutral plan of the FlexShard paper, in its
        symbols: ``[c B cum_p(K) - K (M - a)] / (M/W - a)`` rows are copied to nodes. Excludes rows
        whose copies save no time.
        """
        hot = _clip(self.hot_in_memory(self.costs.flex_static), self.hot_that_fit)
        return self.best(self.most_flex(hot, each.flex_in_time()) for each in self.with_each_syncs)

    def joint(self) -> Cuts:
        """Return the choice of copied rows with the least time or fewest bytes within the budget.

        Optimal if gradients are all-reduced. If embedding dimensions differ, the result may be one
        row off the optimum. With a sparse sync of gradients, it may be a local optimum.
        """
        return self.best(cuts for each in self.with_each_syncs for cuts in each._candidates())

    def _candidates(self) -> Iterator[Cuts]:
        """Yield promising choices of copied rows. The best choice is among them."""
        fewest, most = self.hot_that_fit
        for hot in (self.two_tier().hot, fewest, most):
            yield Cuts(hot, hot)
        if self.cluster.nodes == 1:
            return
        last = self.flex_in_time()
        yield self.most_flex(fewest, last)
        best = self._best_hot(last).num_rows
        tried = {*range(max(fewest.num_rows, best - _TRIED), min(most.num_rows, best + _TRIED) + 1)}
        width = most.num_rows - fewest.num_rows
        if width and self.syncs is not None and self.syncs.sparse:
            # Bisection may converge to a local optimum.
            tried |= {fewest.num_rows + round(width ** (n / _SPREAD)) for n in range(_SPREAD)}
        for num_rows in sorted(tried):
            yield self.most_flex(self.ranking.first(num_rows), last)
        everything = self.ranking.everything
        least = self.hot_in_memory(self.costs.flex_static)
        if self.fits(least, everything):
            beside_flex = self._fitting(least, partial(self.fits, flex=everything))
            w = self.ranking.keys
            saved = w * self.costs.a2a_intra + self.gradient_seconds("flex", w)
            pays = self.ranking.while_true(saved > self.gradient_seconds("hot", w))
            for hot in (pays, self.ranking.first(0)):
                yield Cuts(_clip(hot, beside_flex), everything)

    def _best_hot(self, last: Prefix) -> Prefix:
        """Return the best rows to copy to every rank.

        Assumes that the remaining memory is used to copy further rows, up to ``last``, to nodes.
        """
        costs, ranking = self.costs, self.ranking
        fewest, most = self.hot_that_fit

        def pays(hot: Prefix) -> bool:
            if hot.num_rows <= fewest.num_rows or hot.num_rows > most.num_rows:
                return hot.num_rows <= fewest.num_rows
            w = ranking.key(hot.num_rows - 1)
            as_hot, as_flex = (self._seconds_of(tier, w) for tier in ("hot", "flex"))
            if hot.num_rows > last.num_rows:
                return w * costs.a2a_global >= as_hot
            seconds = as_flex - as_hot + w * costs.a2a_intra
            memory = costs.flex_static - costs.hot_static + w * costs.saved
            flex = self.most_flex(hot, last).flex
            return seconds + memory * self._worth_of_a_byte(flex, last) >= 0

        return ranking.longest(pays)

    def _seconds_of(self, tier: Literal["hot", "flex"], w: float) -> float:
        return float(self.gradient_seconds(tier, np.array([w]))[0])

    def _worth_of_a_byte(self, flex: Prefix, last: Prefix) -> float:
        """Return the seconds per step that one more byte for rows copied to nodes would save."""
        if flex.num_rows >= last.num_rows:
            return 0.0
        costs, w = self.costs, self.ranking.key(flex.num_rows)
        saved = (costs.a2a_global - costs.a2a_intra) * w - self._seconds_of("flex", w)
        return saved / (costs.flex_static - costs.row_wise_static)


def _clip(prefix: Prefix, within: tuple[Prefix, Prefix]) -> Prefix:
    shortest, longest = within
    if prefix.num_rows < shortest.num_rows:
        return shortest
    return prefix if prefix.num_rows < longest.num_rows else longest


def _sent(start: Prefix, stop: Prefix) -> float:
    """Return the embedding scalars sent per batch for rows of ``stop`` that ``start`` lacks.

    Returns 0 if the difference is only a rounding error.
    """
    sent = stop.sent - start.sent
    return sent if sent > _ROUNDING * stop.sent else 0.0
