"""Plays batches of any number of ranks through a plan of tiers, and through plain row-wise tables.

Nothing is trained and no rank is started: which ids of a batch go where is counted, and from that
what each rank sends, to the byte as ``CollectiveBytes`` counts it (docs/measuring.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.cluster import CollectiveSeconds
from recd_plugin_flexshard.planning.exchange import Exchange
from recd_plugin_flexshard.planning.plan import TierPlan
from recd_plugin_flexshard.planning.routes import TableRoute, routes_of
from recd_plugin_flexshard.planning.traffic import (
    ID_BYTES,
    LENGTH_BYTES,
    Tier,
    cold_size_bytes,
    flex_size_bytes,
    traffic,
)

ByRank = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepLookups:
    """What one rank looks up in one step.

    Attributes:
        counts: of each table of the plan, ids by place, as ``TableRoute.counts`` has them; distinct
            ones where they are coalesced.
        lists: lists of all features of the tables, those without ids too; one a feature where ids
            are coalesced.
        length_bytes: of the number that says how long a list is.
        ids: of each table, before they are coalesced; None where they are not.
    """

    counts: list[NDArray[np.int64]]
    lists: int
    length_bytes: int = LENGTH_BYTES
    ids: list[int] | None = None


class BatchIds(Protocol):
    """Where batches come from."""

    name: str

    def read(
        self, routes: list[TableRoute], rank: int, steps: int
    ) -> Iterator[tuple[StepLookups, StepLookups]]:
        """The batches of a rank, ``steps`` of them: as the plan has them, and as plain KJTs.

        The first are coalesced where ``routes`` are.
        """


@dataclass(frozen=True, eq=False)
class PlayedTier:
    """What one tier sends. Arrays are int64 ``[steps, world_size]``.

    Attributes:
        collective: ``all_to_all``, ``all_reduce``, or ``sparse`` for gradients of touched rows.
        group: the ranks of a collective: ``global``, ``node``, or ``cross`` for one of each node.
        sent_integers: bytes of ids, lengths and sizes that a rank sends to others.
        sent_floats: bytes of embeddings and gradients, forward and backward.
        received: bytes of both that it gets from others.
        seconds: what the collective takes in each step, by the slowest rank, ``[steps]`` float64.
    """

    collective: Literal["all_to_all", "all_reduce", "sparse"]
    group: Literal["global", "node", "cross"]
    sent_integers: ByRank
    sent_floats: ByRank
    received: ByRank
    seconds: NDArray[np.float64]

    @property
    def sent(self) -> ByRank:
        """Bytes of both payloads."""
        return self.sent_integers + self.sent_floats


@dataclass(frozen=True, eq=False)
class PlayedSide:
    """One way to shard the tables.

    Attributes:
        tiers: those that send something.
        lookups: ids that enter the lookups of a rank, int64 ``[steps, world_size]``.
        static_memory: bytes of the rows that each rank holds, copies ``M`` times, float64
            ``[world_size]``.
        activations: bytes of embeddings that a rank holds, float64 ``[steps, world_size]``.
    """

    tiers: Mapping[Tier, PlayedTier]
    lookups: ByRank
    static_memory: NDArray[np.float64]
    activations: NDArray[np.float64]

    @property
    def received(self) -> ByRank:
        """Bytes that a rank gets in all-to-alls, ``[steps, world_size]``."""
        total = np.zeros_like(self.lookups)
        for tier in self.tiers.values():
            if tier.collective == "all_to_all":
                total += tier.received
        return total

    @property
    def memory(self) -> NDArray[np.float64]:
        """The most bytes of each rank in any step, ``[world_size]``."""
        most: NDArray[np.float64] = self.static_memory + self.activations.max(0)
        return most

    @property
    def seconds(self) -> CollectiveSeconds:
        """Seconds of a step, the mean over steps."""

        def mean(tier: Tier) -> float:
            return float(self.tiers[tier].seconds.mean()) if tier in self.tiers else 0.0

        return CollectiveSeconds(mean("cold"), mean("flex"), mean("hot"), mean("flex_gradients"))


@dataclass(frozen=True, eq=False)
class Simulation:
    """What some steps came to.

    Attributes:
        plan: that was played.
        source: where its batches came from, in words.
        steps: how many.
        tiered: with the tiers of the plan.
        row_wise: the tables row-wise, of plain batches: without tiers, deduplication and
            coalescing.
    """

    plan: TierPlan
    source: str
    steps: int
    tiered: PlayedSide
    row_wise: PlayedSide

    @property
    def a2a_reduction(self) -> float:
        """The share of the row-wise tables' embeddings and gradients saved in all-to-alls of all
        ranks, which ``TierPlan.a2a_reduction`` predicts."""
        stock = int(self.row_wise.tiers["cold"].sent_floats.sum())
        return 1 - int(self.tiered.tiers["cold"].sent_floats.sum()) / stock if stock else 0.0


def imbalance(by_rank: NDArray[np.int64]) -> float:
    """The most of a rank over the mean, the mean over steps, of ``[steps, world_size]``; or 1."""
    means = by_rank.mean(1)
    ratios = by_rank.max(1)[means > 0] / means[means > 0]
    return float(ratios.mean()) if len(ratios) else 1.0


def simulate(
    plan: TierPlan, source: BatchIds, steps: int, progress: Callable[[], None] | None = None
) -> Simulation:
    """Play ``steps`` batches of every rank of the plan's cluster through ``plan``.

    Rank by rank: memory is that of the chosen rows, of one rank's batch, and a few numbers for each
    rank and step.

    Args:
        plan: its tables count as those of one EmbeddingCollection.
        source: of batches.
        steps: at least 1.
        progress: called after each rank.

    Raises:
        RecdError: the source has no such batches.
    """
    routes = routes_of(plan)
    tiered, stock = _Side(plan, routes, steps), _Side(plan, routes, steps)
    for rank in range(plan.cluster.world_size):
        for step, (mine, plain) in enumerate(source.read(routes, rank, steps)):
            tiered.add(step, rank, mine)
            stock.add(step, rank, _all_cold(plain))
        if progress is not None:
            progress()
    return Simulation(
        plan, source.name, steps, tiered.played(plan), stock.played(_without_tiers(plan))
    )


def _all_cold(lookups: StepLookups) -> StepLookups:
    counts = [np.zeros_like(found) for found in lookups.counts]
    for cold, found in zip(counts, lookups.counts, strict=True):
        cold[-1] = found.sum(0)
    return replace(lookups, counts=counts)


def _without_tiers(plan: TierPlan) -> TierPlan:
    return replace(
        plan,
        tables=tuple(replace(table, hot=0, flex=0) for table in plan.tables),
        options=plan.options.plain,
    )


class _Side:
    """Adds up what ranks look up, step by step."""

    def __init__(self, plan: TierPlan, routes: list[TableRoute], steps: int) -> None:
        ranks, node = plan.cluster.world_size, plan.cluster.ranks_per_node
        self._routes = routes
        self._cold, self._flex = Exchange(steps, ranks, ranks), Exchange(steps, ranks, node)
        self._hot_ids, self._hot_scalars = (np.zeros((steps, ranks), np.int64) for _ in range(2))
        self._lengths = np.zeros((steps, ranks), np.int64)
        # Of coalesced ids: the embeddings of all ids, made from those of the distinct ones.
        self._expanded = np.zeros((steps, ranks), np.int64)

    def add(self, step: int, rank: int, lookups: StepLookups) -> None:
        self._lengths[step, rank] = lookups.lists * lookups.length_bytes
        for route, counts in zip(self._routes, lookups.counts, strict=True):
            dim = route.tiers.demand.embedding_dim
            hot = int(counts[0].sum())
            self._hot_ids[step, rank] += hot
            self._hot_scalars[step, rank] += hot * dim
            self._flex.add(step, rank, counts[1:-1].sum(1), dim)
            self._cold.add(step, rank, counts[-1], dim)
        for route, ids in zip(self._routes, lookups.ids or (), strict=lookups.ids is not None):
            self._expanded[step, rank] += ids * route.tiers.demand.embedding_dim

    def played(self, plan: TierPlan) -> PlayedSide:
        """What ``plan``, with these tiers or none, makes of it."""
        cold, flex = self._cold, self._flex
        width = plan.options.activation_bytes
        embeddings = cold.scalars_out + cold.scalars_in + flex.scalars_out + flex.scalars_in
        hot = (2 - plan.options.saved_bytes / width) * self._hot_scalars
        return PlayedSide(
            tiers={
                "cold": self._all_to_all(plan),
                **self._hot(plan),
                **self._flex_tiers(plan),
            },
            lookups=cold.ids_in + flex.ids_in + self._hot_ids,
            static_memory=self._static(plan),
            activations=width * (self._expanded + embeddings + hot),
        )

    def _all_to_all(self, plan: TierPlan) -> PlayedTier:
        cold, ranks = self._cold, plan.cluster.world_size
        sizes = cold_size_bytes(plan)
        options = plan.options
        rows, back = options.wire_bytes, options.gradient_share * options.wire_bytes
        lengths_in = self._lengths.sum(1, keepdims=True) - self._lengths
        return PlayedTier(
            "all_to_all",
            "global",
            sent_integers=ID_BYTES * cold.ids_sent + (ranks - 1) * self._lengths + sizes,
            sent_floats=_bytes(rows * cold.scalars_sent + back * cold.scalars_received),
            received=ID_BYTES * cold.ids_received
            + lengths_in
            + sizes
            + _bytes(rows * cold.scalars_received + back * cold.scalars_sent),
            seconds=_seconds(
                cold, options.row_wise_bytes, plan.cluster.collectives.a2a_global.seconds_for
            ),
        )

    def _hot(self, plan: TierPlan) -> dict[Tier, PlayedTier]:
        reduced = plan.options.bytes_per_scalar * sum(
            table.hot * table.demand.embedding_dim for table in plan.tables
        )
        if not reduced:
            return {}
        if plan.syncs.hot == "sparse":
            return {"hot": self._predicted(plan, "hot")}
        seconds = plan.cluster.collectives.ar_global.seconds_for(reduced)
        by_rank = np.full(self._hot_ids.shape[1], reduced)
        return {"hot": self._all_reduce("global", by_rank, plan.cluster.world_size, seconds)}

    def _flex_tiers(self, plan: TierPlan) -> dict[Tier, PlayedTier]:
        if not any(table.flex for table in plan.tables):
            return {}
        cluster, flex, sizes = plan.cluster, self._flex, flex_size_bytes(plan)
        # What a rank sends forward it gets back.
        floats = _bytes(plan.options.wire_bytes * (flex.scalars_sent + flex.scalars_received))
        held = plan.options.bytes_per_scalar * sum(
            route.flex_rows_held() * route.tiers.demand.embedding_dim for route in self._routes
        )
        seconds = cluster.collectives.ar_cross.seconds_for(float(np.max(held)))
        return {
            "flex": PlayedTier(
                "all_to_all",
                "node",
                sent_integers=ID_BYTES * flex.ids_sent + sizes,
                sent_floats=floats,
                received=ID_BYTES * flex.ids_received + sizes + floats,
                seconds=_seconds(
                    flex, plan.options.flex_bytes, cluster.collectives.a2a_intra.seconds_for
                ),
            ),
            "flex_gradients": self._predicted(plan, "flex_gradients")
            if plan.syncs.flex == "sparse"
            else self._all_reduce("cross", np.tile(held, cluster.nodes), cluster.nodes, seconds),
        }

    def _predicted(self, plan: TierPlan, tier: Tier) -> PlayedTier:
        """Of a sync of touched rows what the plan says: which rows batches share is not played."""
        sent = traffic(plan)[tier]
        bits, floats = (
            np.full_like(self._hot_ids, round(num_bytes))
            for num_bytes in (sent.integer_bytes, sent.float_bytes)
        )
        seconds = np.full(len(bits), sent.seconds)
        return PlayedTier(sent.collective, sent.group, bits, floats, bits + floats, seconds)

    def _all_reduce(
        self,
        group: Literal["global", "cross"],
        reduced: NDArray[np.float64],
        ranks: int,
        seconds: float,
    ) -> PlayedTier:
        """``reduced``: bytes of the tensor of each rank; ``ranks``: that reduce it together."""
        steps = len(self._hot_ids)
        sent = np.tile((2 * reduced * (ranks - 1) // ranks).astype(np.int64), (steps, 1))
        nothing = np.zeros_like(sent)
        return PlayedTier("all_reduce", group, nothing, sent, sent, np.full(steps, seconds))

    def _static(self, plan: TierPlan) -> NDArray[np.float64]:
        """The table itself keeps all rows; copies come on top."""
        options, cluster = plan.options, plan.cluster
        scalars = np.zeros(cluster.world_size)
        for route, table in zip(self._routes, plan.tables, strict=True):
            copies = np.zeros(cluster.ranks_per_node) + table.hot
            if table.flex:
                copies += route.flex_rows_held()
            held = route.rows_held() + options.memory_multiplier * np.tile(copies, cluster.nodes)
            scalars += held * table.demand.embedding_dim
        return options.bytes_per_scalar * scalars


def _bytes(of_ranks: NDArray[np.floating[Any]]) -> ByRank:
    return np.rint(of_ranks).astype(np.int64)


def _seconds(
    exchange: Exchange, scalar_bytes: float, seconds_for: Callable[[float], float]
) -> NDArray[np.float64]:
    """Of the rank with the most to send or to get, forward and backward."""
    most = np.maximum(exchange.scalars_out, exchange.scalars_in).max(1)
    return np.array([seconds_for(scalar_bytes * float(each)) for each in most])
