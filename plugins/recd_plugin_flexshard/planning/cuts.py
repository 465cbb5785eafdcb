"""Where the tiers of FlexShard end (arXiv 2301.02959, section 4): prefixes of all tables' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal

import numpy as np

from recd_plugin_flexshard.planning.cluster import ClusterShape, CollectiveSeconds
from recd_plugin_flexshard.planning.costs import CostOptions, Load, RowCosts, row_wise
from recd_plugin_flexshard.planning.ranking import Prefix, Ranking, bits_float, float_bits
from recd_plugin_flexshard.planning.sync import Copies, CopyGroup, Sync, Syncs
from recd_plugins.api import SetupError

# Of a sum over all rows, relative.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Cuts:
    """Rows up to ``hot`` are data-parallel, from there to ``flex`` in the flex tier, then cold."""

    hot: Prefix
    flex: Prefix


@dataclass(frozen=True)
class CutModel:
    """What all cuts of the rows of ``ranking`` cost, and which of them memory allows.

    Per row costs are proportional to the row's elements, so that rows of all tables are compared by
    how often they are sent, whatever their dimension. Of the bits of a sparse sync, one a row, this
    is so of their mean.

    ``syncs``: how gradients are summed while cuts are sought; None: as the options say of these.
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
        """Bytes that a rank may use."""
        if self.options.memory_bytes is not None:
            return self.options.memory_bytes
        return self.options.memory_ratio * self.plain_memory

    @cached_property
    def plain_memory(self) -> float:
        """Bytes of a rank with all rows row-wise, neither deduplicated nor coalesced."""
        lookups = self.ranking.plain_lookups
        plain = Load(self.ranking.everything.scalars, 1, lookups, lookups)
        cost = row_wise(plain, self.cluster, self.options.plain)
        return cost.static_memory + cost.dynamic_memory

    @cached_property
    def _row_wise_memory(self) -> float:
        everything = self.ranking.everything
        load = Load(everything.scalars, 1, self.ranking.lookups, everything.sent)
        cost = row_wise(load, self.cluster, self.options)
        return cost.static_memory + cost.dynamic_memory

    def memory(self, cuts: Cuts) -> float:
        """Bytes of a rank: rows of all tiers, and activations."""
        costs, hot = self.costs, cuts.hot
        return (
            self._row_wise_memory
            + (costs.hot_static - costs.row_wise_static) * hot.scalars
            - costs.saved * hot.sent
            + (costs.flex_static - costs.row_wise_static) * (cuts.flex.scalars - hot.scalars)
        )

    def fits(self, hot: Prefix, flex: Prefix | None = None) -> bool:
        """Whether memory allows these cuts; the rounding of sums apart."""
        return self.memory(Cuts(hot, flex or hot)) <= self.budget * (1 + _ROUNDING)

    def seconds(self, cuts: Cuts) -> CollectiveSeconds:
        """What the collectives take (FlexShard, table 6)."""
        collectives, options = self.cluster.collectives, self.options
        hot, flex, everything = cuts.hot, cuts.flex, self.ranking.everything
        syncs = self.syncs_of(cuts)
        of_hot, of_flex = self.copies(cuts)
        return CollectiveSeconds(
            a2a_global=collectives.a2a_global.seconds_for(
                options.row_wise_bytes * _sent(flex, everything)
            ),
            a2a_intra=collectives.a2a_intra.seconds_for(options.flex_bytes * _sent(hot, flex)),
            ar_global=of_hot.seconds(syncs.hot),
            ar_cross=of_flex.seconds(syncs.flex),
        )

    def copies(self, cuts: Cuts) -> tuple[Copies, Copies]:
        """Hot ones, and flex ones."""
        collectives, options = self.cluster.collectives, self.options
        scalar, wire = options.bytes_per_scalar, options.wire_bytes
        (hot_group, flex_group), node = self.groups, self.cluster.ranks_per_node
        hot, flex = cuts.hot, cuts.flex
        of_hot, of_flex = 0.0, 0.0
        if self.ranking.groups:
            of_hot = hot.exchanged[0]
            of_flex = max(0.0, flex.exchanged[1] - hot.exchanged[1]) / node
        shard = (flex.scalars - hot.scalars) / node
        rows = (flex.num_rows - hot.num_rows) / node
        return (
            Copies(
                hot_group,
                collectives.ar_global,
                hot.num_rows,
                scalar * hot.scalars,
                wire * of_hot,
            ),
            Copies(flex_group, collectives.ar_cross, rows, scalar * shard, wire * of_flex),
        )

    def syncs_of(self, cuts: Cuts) -> Syncs:
        """How gradients of the copies are summed."""
        if self.syncs is not None:
            return self.syncs
        sync, minimise = self.options.sync, self.options.minimise
        if sync != "auto":
            return Syncs(sync, sync)
        hot, flex = self.copies(cuts)
        return Syncs(hot.cheapest(minimise), flex.cheapest(minimise))

    @cached_property
    def groups(self) -> tuple[CopyGroup, CopyGroup]:
        if not self.ranking.groups:  # of dense syncs alone
            return CopyGroup.hot(self.cluster), CopyGroup.flex(self.cluster)
        hot, flex = self.ranking.groups
        return hot, flex

    @property
    def with_each_syncs(self) -> list[CutModel]:
        """This model for each choice that the options leave, in which a row costs what it costs
        whichever cuts there are."""
        if self.syncs is not None or self.options.sync == "dense":
            return [self]
        each: tuple[Sync, ...] = ("dense", "sparse") if self.options.sync == "auto" else ("sparse",)
        return [replace(self, syncs=Syncs(hot, flex)) for hot in each for flex in each]

    def hot_seconds(self, sent: float) -> float:
        """Seconds of an element's gradients in the data-parallel tier, of a row with that ``w``."""
        return self.costs.ar_global * self._summed("hot", sent)

    def flex_seconds(self, sent: float) -> float:
        """The same in the flex tier."""
        return self.costs.ar_cross * self._summed("flex", sent)

    def _summed(self, tier: Literal["hot", "flex"], sent: float) -> float:
        """What the sum of a gradient sends, over what a dense one does."""
        group = self.groups[tier == "flex"]
        if self.syncs is None or getattr(self.syncs, tier) == "dense" or group.members == 1:
            return 1.0
        everything = self.ranking.everything
        bits = group.bits(everything.num_rows / everything.scalars) / group.sent_of_reduced
        exchanged = group.exchanged(np.array([sent]), self.options.coalesce)
        return (
            self.options.wire_bytes * float(exchanged[0]) + bits
        ) / self.options.bytes_per_scalar

    @cached_property
    def comm_dp_rw(self) -> float:
        """The w from which a row takes less time in the data-parallel than the row-wise tier."""
        if self.syncs is None or self.syncs.hot == "dense":
            return self.costs.comm_dp_rw
        return self.threshold(lambda sent: sent * self.costs.a2a_global - self.hot_seconds(sent))

    @cached_property
    def comm_flex_rw(self) -> float:
        """The same, in the flex than in the row-wise tier."""
        if self.syncs is None or self.syncs.flex == "dense":
            return self.costs.comm_flex_rw
        saved = self.costs.a2a_global - self.costs.a2a_intra
        return self.threshold(lambda sent: sent * saved - self.flex_seconds(sent))

    @cached_property
    def comm_dp_flex(self) -> float:
        """The same, in the data-parallel than in the flex tier."""
        costs = self.costs
        if self.syncs is None or self.syncs == Syncs():
            return (costs.ar_global - costs.ar_cross) / costs.a2a_intra
        return self.threshold(
            lambda sent: sent * costs.a2a_intra + self.flex_seconds(sent) - self.hot_seconds(sent)
        )

    def threshold(self, saved: Callable[[float], float]) -> float:
        """The ``w`` up to which ``saved`` is not above 0, beyond which it is; below 0: none is."""
        low, high = -1, float_bits(max(table.largest for table in self.ranking.tables))
        if saved(bits_float(high)) <= 0:
            return inf
        while high - low > 1:
            middle = (low + high) // 2
            if saved(bits_float(middle)) > 0:
                high = middle
            else:
                low = middle
        return bits_float(low) if low >= 0 else -1.0

    @property
    def plain_seconds(self) -> CollectiveSeconds:
        """The same with all rows row-wise, neither deduplicated nor coalesced."""
        num_bytes = self.options.plain.row_wise_bytes * self.ranking.plain_lookups
        a2a = self.cluster.collectives.a2a_global.seconds_for(num_bytes)
        return CollectiveSeconds(a2a, 0.0, 0.0, 0.0)

    def a2a_reduction(self, cuts: Cuts) -> float:
        """The share of plain row-wise sharding's bytes that the global all-to-all does not send."""
        plain = self.options.plain.row_wise_bytes * self.ranking.plain_lookups
        sent = _sent(cuts.flex, self.ranking.everything)
        saved = plain - self.options.row_wise_bytes * sent
        return saved / plain if saved > _ROUNDING * plain else 0.0

    @cached_property
    def hot_that_fit(self) -> tuple[Prefix, Prefix]:
        """The fewest and the most data-parallel rows that memory allows beside row-wise ones.

        Raises ``SetupError`` where it allows none.
        """
        least = self.ranking.above(self.costs.mem_dp_rw)
        if not self.fits(least):
            needed = self.memory(Cuts(least, least))
            coalesced = "plan without coalescing, " if self.options.coalesce else ""
            raise SetupError(
                f"the tables take at least {needed:,.0f} bytes of each rank, with "
                f"{least.num_rows:,} rows on all ranks, but {self.budget:,.0f} bytes are allowed; "
                f"plain row-wise sharding takes {self.plain_memory:,.0f}. Allow more memory, "
                f"{coalesced}use more ranks or a smaller batch"
            )
        return self._fitting(least, self.fits)

    @cached_property
    def hot_beside_flex(self) -> tuple[Prefix, Prefix] | None:
        """The same with all other rows in the flex tier; None where memory allows none."""
        least = self.ranking.above(self.costs.mem_dp_flex)

        def fits(hot: Prefix) -> bool:
            return self.fits(hot, self.ranking.everything)

        return self._fitting(least, fits) if fits(least) else None

    def _fitting(self, least: Prefix, fits: Callable[[Prefix], bool]) -> tuple[Prefix, Prefix]:
        """The shortest and the longest prefix that fits, ``least`` taking the least memory."""
        most = self.ranking.longest(fits, beyond=least)
        if fits(self.ranking.nothing):
            return self.ranking.nothing, most
        too_few = self.ranking.longest(
            lambda prefix: prefix.num_rows < least.num_rows and not fits(prefix)
        )
        return self.ranking.first(too_few.num_rows + 1), most

    def most_flex(self, hot: Prefix, last: Prefix) -> Cuts:
        """``hot`` and all the flex rows that memory allows, up to ``last``."""

        def allowed(flex: Prefix) -> bool:
            return flex.num_rows <= last.num_rows and self.fits(hot, flex)

        return Cuts(hot, self.ranking.longest(allowed, beyond=hot))

    def two_tier(self) -> Cuts:
        """Data-parallel and row-wise rows: the least time that memory allows.

        With the defaults that is FlexShard's memory-neutral plan: the most K rows with
        ``K (M - a) <= c B cum_p(K)``.
        """
        ways = []
        for model in self.with_each_syncs:
            hot = clip(self.ranking.above(model.comm_dp_rw), self.hot_that_fit)
            ways.append(Cuts(hot, hot))
        return self.best(ways)

    def best(self, each: Iterable[Cuts]) -> Cuts:
        """The cuts that take the least time, of equals the least memory."""
        overlap = 1 - self.options.exposed
        return min(each, key=lambda cuts: (self.seconds(cuts).exposed(overlap), self.memory(cuts)))

    def three_tier(self) -> Cuts:
        """FlexShard's plan: rows that pay in memory data-parallel, then flex ones, then row-wise.

        Of flex rows there are as many as memory allows, ``[c B cum_p(K) - K (M - a)] / (M/W - a)``
        in the memory-neutral plan, but none that take more time than they save. Raises
        ``SetupError`` on one node.
        """
        if self.cluster.nodes == 1:
            raise SetupError(
                "three_tier keeps a flex row on one rank of each node, and the cluster has one "
                "node, where that is row-wise sharding; take two_tier or joint"
            )
        by_stop = {"dp_flex": self.costs.mem_dp_flex, "dp_rw": self.costs.mem_dp_rw}
        hot = clip(self.ranking.above(by_stop[self.options.stop]), self.hot_that_fit)
        return self.best(
            self.most_flex(hot, self.ranking.above(model.comm_flex_rw))
            for model in self.with_each_syncs
        )


def clip(prefix: Prefix, within: tuple[Prefix, Prefix]) -> Prefix:
    """``prefix``, or the nearest of those ``within``."""
    shortest, longest = within
    if prefix.num_rows < shortest.num_rows:
        return shortest
    return prefix if prefix.num_rows < longest.num_rows else longest


def _sent(start: Prefix, stop: Prefix) -> float:
    """Elements that are sent for the rows from ``start`` to ``stop``; what rounding leaves is 0."""
    sent = stop.sent - start.sent
    return sent if sent > _ROUNDING * stop.sent else 0.0
