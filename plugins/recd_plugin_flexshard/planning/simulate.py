"""Plays batches of any number of ranks through a plan of tiers, and through row-wise tables.

Nothing is trained and no rank is started: counting which ids go where gives what each rank sends,
to the byte as ``CollectiveBytes`` counts it (docs/measuring.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import (
    SCALAR_BYTES,
    ClusterShape,
    CollectiveSeconds,
    Floats,
)
from recd_plugin_flexshard.planning.demand import TableDemand
from recd_plugin_flexshard.planning.plan import (
    ID_BYTES,
    LENGTH_BYTES,
    TableTiers,
    Tier,
    TierPlan,
    cold_size_bytes,
    flex_size_bytes,
    traffic,
)

Counts = NDArray[np.int64]
# Rows that are looked at together: their arrays stay small beside those of a table.
_CHUNK = 1 << 22


class TableRoute:
    """The places of one table's rows.

    Counts by place are arrays ``[2 + ranks_per_node, world_size]``. Lines are the tiers: hot, flex
    rows by rank of a node, cold. Columns are the ranks that hold the row in the table itself, which
    TorchRec's row-wise sharding cuts into blocks of ``ceil(E / U)`` rows.
    """

    def __init__(
        self, tiers: TableTiers, cluster: ClusterShape, first_flex: int, coalesced: bool = False
    ) -> None:
        self.tiers = tiers
        self.dim = tiers.demand.embedding_dim
        self.coalesced = coalesced
        node = cluster.ranks_per_node
        self.shape = (2 + node, cluster.world_size)
        self._block = -(-tiers.demand.num_embeddings // cluster.world_size)
        dealt = (first_flex + np.arange(tiers.flex)) % node
        self.flex_held = np.bincount(dealt, minlength=node)
        rows = np.concatenate([tiers.hot_rows, tiers.flex_rows])
        order = np.argsort(rows)
        lines = np.concatenate([np.zeros(tiers.hot, np.int64), 1 + dealt])
        # Ids beyond the last chosen row compare with one that is none.
        self._sorted = np.append(rows[order], np.iinfo(np.int64).max)
        self._lines = np.append(lines[order], node + 1)

    def rows_held(self) -> Counts:
        """Return the rows of the table in the shard of each rank."""
        starts = np.arange(self.shape[1]) * self._block
        return np.clip(self.tiers.demand.num_embeddings - starts, 0, self._block)

    def counts(self, ids: Counts) -> Counts:
        """Return how many of ``ids`` are of each place."""
        return self._by_place(self._lines_of(ids), ids)

    def rates(self, demand: TableDemand, of: Callable[[Floats], Floats] = np.asarray) -> Floats:
        """Sum ``of`` the mean accesses to a row by one sample, over the rows of each place."""
        rates = np.zeros(self.shape)
        left = self._by_place(self._lines[:-1], self._sorted[:-1])
        left[-1] = self.rows_held() - left.sum(0)
        probabilities, repeats = demand.bins()
        ends = np.cumsum(repeats)
        known = demand.num_embeddings - demand.tail_rows
        for start in range(0, known, _CHUNK):
            ranks = np.arange(start, min(start + _CHUNK, known))
            rows = demand.ids(start, start + len(ranks))
            values = of(probabilities[np.searchsorted(ends, ranks, side="right")])
            lines = self._lines_of(rows)
            rates += self._by_place(lines, rows, values)
            left -= self._by_place(lines, rows)
        return rates + left * of(np.array([demand.tail_probability]))

    def _lines_of(self, ids: Counts) -> Counts:
        found = np.searchsorted(self._sorted, ids)
        return np.where(self._sorted[found] == ids, self._lines[found], self.shape[0] - 1)

    def _by_place(self, lines: Counts, ids: Counts, weights: Any = None) -> Any:
        places = lines * self.shape[1] + ids // self._block
        size = self.shape[0] * self.shape[1]
        return np.bincount(places, weights, minlength=size).reshape(self.shape)


def routes_of(plan: TierPlan) -> list[TableRoute]:
    """Return the routes of the tables of ``plan``, as one EmbeddingCollection has them."""
    first, routes = 0, []
    for table in plan.tables:
        routes.append(TableRoute(table, plan.cluster, first, plan.options.coalesce))
        first += table.flex
    return routes


@dataclass(frozen=True, eq=False)
class StepLookups:
    """The lookups of one rank in one step.

    Attributes:
        counts: of each table, ids by place (``TableRoute.counts``); distinct ones if coalesced.
        lists: lists of all features of the tables; one a feature if coalesced.
        length_bytes: of a length.
        ids: of each table, before they are coalesced; None if they are not.
    """

    counts: list[Counts]
    lists: int
    length_bytes: int = LENGTH_BYTES
    ids: list[int] | None = None


class BatchIds(Protocol):
    """A source of batches."""

    name: str

    def read(
        self, routes: list[TableRoute], rank: int, steps: int
    ) -> Iterator[tuple[StepLookups, StepLookups]]:
        """Yield ``steps`` batches of a rank: as the plan has them, and as plain KJTs."""


@dataclass(frozen=True, eq=False)
class PlayedTier:
    """What one tier sends. Arrays are int64 ``[steps, world_size]``.

    Attributes:
        collective: as in ``TierTraffic``.
        group: as in ``TierTraffic``.
        sent_integers: bytes of ids, lengths and sizes that a rank sends to others.
        sent_floats: bytes of embeddings and gradients, forward and backward.
        received: bytes of both that it gets from others.
        seconds: of the slowest rank in each step, ``[steps]`` float64.
    """

    collective: Literal["all_to_all", "all_reduce", "sparse"]
    group: Literal["global", "node", "cross"]
    sent_integers: Counts
    sent_floats: Counts
    received: Counts
    seconds: Floats

    @property
    def sent(self) -> Counts:
        return self.sent_integers + self.sent_floats


@dataclass(frozen=True, eq=False)
class PlayedSide:
    """One way to shard the tables.

    Attributes:
        tiers: those that send something.
        lookups: ids that enter the lookups of a rank, int64 ``[steps, world_size]``.
        memory: the most bytes of each rank in any step, float64 ``[world_size]``: rows that it
            holds, copies ``M`` times, and embeddings.
    """

    tiers: Mapping[Tier, PlayedTier]
    lookups: Counts
    memory: Floats

    @property
    def received(self) -> Counts:
        """Bytes that a rank gets in all-to-alls, ``[steps, world_size]``."""
        exchanged = [t.received for t in self.tiers.values() if t.collective == "all_to_all"]
        return np.sum(exchanged, axis=0)

    @property
    def seconds(self) -> CollectiveSeconds:
        """Seconds of a step, the mean over steps."""
        mean = {name: float(tier.seconds.mean()) for name, tier in self.tiers.items()}
        order: tuple[Tier, ...] = ("cold", "flex", "hot", "flex_gradients")
        return CollectiveSeconds(*(mean.get(name, 0.0) for name in order))


@dataclass(frozen=True, eq=False)
class Simulation:
    """The result of some steps."""

    plan: TierPlan
    source: str
    steps: int
    tiered: PlayedSide
    row_wise: PlayedSide

    @property
    def a2a_reduction(self) -> float:
        """The saved share of the row-wise tables' embedding bytes in the global all-to-all."""
        stock = int(self.row_wise.tiers["cold"].sent_floats.sum())
        return 1 - int(self.tiered.tiers["cold"].sent_floats.sum()) / stock if stock else 0.0


def imbalance(by_rank: Counts) -> float:
    """Return the most of a rank over the mean, averaged over the steps of ``[steps, ranks]``."""
    means = by_rank.mean(1)
    ratios = by_rank.max(1)[means > 0] / means[means > 0]
    return float(ratios.mean()) if len(ratios) else 1.0


def simulate(plan: TierPlan, source: BatchIds, steps: int) -> Simulation:
    """Play ``steps`` batches of every rank of the plan's cluster through ``plan``.

    Its tables count as those of one EmbeddingCollection.
    """
    routes = routes_of(plan)
    tiered, stock = _Side(plan, routes, steps), _Side(plan, routes, steps)
    for rank in range(plan.cluster.world_size):
        for step, (mine, plain) in enumerate(source.read(routes, rank, steps)):
            tiered.add(step, rank, mine)
            stock.add(step, rank, _all_cold(plain))
    untiered = tuple(replace(table, hot=0, flex=0) for table in plan.tables)
    plain_plan = replace(plan, tables=untiered, options=plan.options.plain)
    return Simulation(plan, source.name, steps, tiered.played(plan), stock.played(plain_plan))


def _all_cold(lookups: StepLookups) -> StepLookups:
    counts = [np.zeros_like(found) for found in lookups.counts]
    for cold, found in zip(counts, lookups.counts, strict=True):
        cold[-1] = found.sum(0)
    return replace(lookups, counts=counts)


class _Exchange:
    """Sums of an all-to-all of ids, and of the embeddings that come back for them.

    ``..._out`` is what a rank wants, of itself too, and ``..._in`` what is wanted of it;
    int64 ``[steps, world_size]``.
    """

    def __init__(self, steps: int, world_size: int, group_size: int) -> None:
        self._group_size = group_size
        self.ids_out, self.ids_in, self.ids_own = np.zeros((3, steps, world_size), np.int64)
        self.out, self.into, self.own = np.zeros((3, steps, world_size), np.int64)

    def add(self, step: int, rank: int, wanted: Counts, dim: int) -> None:
        """Add so many embeddings that a rank wants of each rank of its group."""
        place = rank % self._group_size
        group = slice(rank - place, rank - place + self._group_size)
        for times, out, into, own in (
            (1, self.ids_out, self.ids_in, self.ids_own),
            (dim, self.out, self.into, self.own),
        ):
            out[step, rank] += times * wanted.sum()
            into[step, group] += times * wanted
            own[step, rank] += times * wanted[place]

    def tier(
        self,
        group: Literal["global", "node"],
        widths: tuple[float, float],
        sizes: int,
        seconds_for: Callable[[float], float],
        lengths: tuple[Any, Any] = (0, 0),
    ) -> PlayedTier:
        """Return the traffic, with bytes of a scalar forward and backward, sizes and lengths."""
        forward, backward = widths
        wanted, served = self.out - self.own, self.into - self.own
        most = np.maximum(self.out, self.into).max(1)
        sent_lengths, received_lengths = lengths
        return PlayedTier(
            "all_to_all",
            group,
            ID_BYTES * (self.ids_out - self.ids_own) + sizes + sent_lengths,
            _bytes(forward * served + backward * wanted),
            ID_BYTES * (self.ids_in - self.ids_own)
            + sizes
            + received_lengths
            + _bytes(forward * wanted + backward * served),
            np.array([seconds_for(sum(widths) * float(each)) for each in most]),
        )


class _Side:
    """Adds up the lookups of ranks, step by step."""

    def __init__(self, plan: TierPlan, routes: list[TableRoute], steps: int) -> None:
        ranks, node = plan.cluster.world_size, plan.cluster.ranks_per_node
        self._routes = routes
        self._cold, self._flex = _Exchange(steps, ranks, ranks), _Exchange(steps, ranks, node)
        # Embeddings of all ids that are made from those of distinct ones: of coalesced ids.
        self._hot_ids, self._hot_scalars, self._lengths, self._expanded = np.zeros(
            (4, steps, ranks), np.int64
        )

    def add(self, step: int, rank: int, lookups: StepLookups) -> None:
        self._lengths[step, rank] = lookups.lists * lookups.length_bytes
        for number, (route, counts) in enumerate(zip(self._routes, lookups.counts, strict=True)):
            hot = int(counts[0].sum())
            self._hot_ids[step, rank] += hot
            self._hot_scalars[step, rank] += hot * route.dim
            self._flex.add(step, rank, counts[1:-1].sum(1), route.dim)
            self._cold.add(step, rank, counts[-1], route.dim)
            if lookups.ids is not None:
                self._expanded[step, rank] += lookups.ids[number] * route.dim

    def played(self, plan: TierPlan) -> PlayedSide:
        """Return the traffic and memory of ``plan``, with these tiers or none."""
        cold, flex, options, by = self._cold, self._flex, plan.options, plan.cluster.collectives
        lengths_in = self._lengths.sum(1, keepdims=True) - self._lengths
        tiers: dict[Tier, PlayedTier] = {
            "cold": cold.tier(
                "global",
                (options.wire_bytes, options.gradient_share * options.wire_bytes),
                cold_size_bytes(plan),
                by.a2a_global.seconds_for,
                ((plan.cluster.world_size - 1) * self._lengths, lengths_in),
            )
        }
        node, nodes = plan.cluster.ranks_per_node, plan.cluster.nodes
        hot_scalars = sum(t.hot * t.demand.embedding_dim for t in plan.tables)
        held = np.zeros(node)
        if any(table.flex for table in plan.tables):
            held += sum(route.flex_held * route.dim for route in self._routes)
            tiers["flex"] = flex.tier(
                "node", (options.wire_bytes,) * 2, flex_size_bytes(plan), by.a2a_intra.seconds_for
            )
            tiers["flex_gradients"] = self._gradients(plan, "flex_gradients", held)
        if hot_scalars:
            tiers["hot"] = self._gradients(plan, "hot", np.full(node, hot_scalars))
        rows = sum(route.rows_held() * route.dim for route in self._routes)
        copies = options.memory_multiplier * np.tile(held + hot_scalars, nodes)
        saved = options.saved_activations * (2 if options.coalesce else 1)
        embeddings = cold.out + cold.into + flex.out + flex.into + self._expanded
        activations = embeddings + (2 - saved) * self._hot_scalars
        memory = SCALAR_BYTES * (rows + copies + activations.max(0))
        return PlayedSide(tiers, cold.ids_in + flex.ids_in + self._hot_ids, memory)

    def _gradients(
        self, plan: TierPlan, tier: Literal["hot", "flex_gradients"], held: Floats
    ) -> PlayedTier:
        """Return the sum of gradients of the scalars that each rank of a node holds."""
        predicted = traffic(plan)[tier]
        steps = len(self._hot_ids)
        ranks = plan.cluster.world_size if tier == "hot" else plan.cluster.nodes
        if predicted.collective == "sparse":
            bits, floats = (
                np.full_like(self._hot_ids, round(num_bytes))
                for num_bytes in (predicted.integer_bytes, predicted.float_bytes)
            )
            seconds = predicted.seconds
        else:
            reduced = SCALAR_BYTES * np.tile(held, plan.cluster.nodes)
            floats = np.tile((2 * reduced * (ranks - 1) // ranks).astype(np.int64), (steps, 1))
            bits = np.zeros_like(floats)
            by = plan.cluster.collectives
            collective = by.ar_global if tier == "hot" else by.ar_cross
            seconds = collective.seconds_for(float(reduced.max()))
        return PlayedTier(
            predicted.collective,
            predicted.group,
            bits,
            floats,
            bits + floats,
            np.full(steps, seconds),
        )


def _bytes(of_ranks: NDArray[np.floating[Any]]) -> Counts:
    return np.rint(of_ranks).astype(np.int64)
