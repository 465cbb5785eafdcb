"""Tier plans: the number of hot, flex and cold rows of each table, and their traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.costs import (
    DENSE,
    SCALAR_BYTES,
    ClusterShape,
    CollectiveSeconds,
    CopyGroup,
    CostOptions,
    Sync,
    Syncs,
    TableDemand,
)
from recd_plugin_flexshard.planning.cuts import CutModel, Cuts, Ranking

Strategy = Literal["row_wise", "two_tier", "three_tier", "joint"]
Tier = Literal["cold", "hot", "flex", "flex_gradients"]
TIERS: tuple[Tier, ...] = ("cold", "hot", "flex", "flex_gradients")
#: Ids and sizes are int64; lengths are int32, as all converters of this package return them.
ID_BYTES, LENGTH_BYTES = 8, 4


@dataclass(frozen=True)
class TableTiers:
    """The number of hot, flex and cold rows of one table, and their accesses.

    Attributes:
        demand: the table and its access frequencies.
        hot: number of hot rows, which are the most accessed and have a copy on every rank.
        flex: number of flex rows, the next most accessed, with a copy in every node. All other
            rows are cold.
        hot_share, flex_share: fractions of the table's accesses to hot and to flex rows.
        hot_sent, flex_sent, cold_sent: number of hot, flex and cold rows that a batch of one rank
            looks up.
        hot_exchanged, flex_exchanged: number of rows whose all-reduce would send as many bytes as
            the sparse sync of hot and of flex gradients.
    """

    demand: TableDemand
    hot: int
    flex: int
    hot_share: float
    flex_share: float
    hot_sent: float
    flex_sent: float
    cold_sent: float
    hot_exchanged: float = 0.0
    flex_exchanged: float = 0.0

    @property
    def name(self) -> str:
        return self.demand.name

    @property
    def cold(self) -> int:
        return self.demand.num_embeddings - self.hot - self.flex

    @property
    def cold_share(self) -> float:
        return max(0.0, 1.0 - self.hot_share - self.flex_share)

    @property
    def shares_sent(self) -> tuple[float, float, float]:
        """Return the fractions of lookups of rows copied to ranks, copied to nodes, not copied."""
        sent = (self.hot_sent, self.flex_sent, self.cold_sent)
        total = sum(sent)
        return (sent[0] / total, sent[1] / total, sent[2] / total) if total else (0.0, 0.0, 1.0)

    @property
    def hot_rows(self) -> NDArray[np.int64]:
        return self.demand.ids(0, self.hot)

    @property
    def flex_rows(self) -> NDArray[np.int64]:
        return self.demand.ids(self.hot, self.hot + self.flex)


@dataclass(frozen=True)
class TierPlan:
    """The rows of tables to copy to every rank or node, and their estimated cost on a cluster.

    Attributes:
        a2a_reduction: fraction of embedding bytes saved in the all-to-all over all ranks, compared
            with TorchRec's row-wise sharding.
        memory_bytes: bytes per rank for the planned tables and their activations.
        row_wise_memory_bytes: bytes per rank with TorchRec's row-wise sharding.
        seconds: seconds per step in each collective.
        row_wise_seconds: seconds per step in each collective with TorchRec's row-wise sharding.
        syncs: whether gradients of copies are summed ``dense`` (all-reduce) or ``sparse``.
    """

    tables: tuple[TableTiers, ...]
    cluster: ClusterShape
    options: CostOptions
    strategy: Strategy
    a2a_reduction: float
    memory_bytes: float
    row_wise_memory_bytes: float
    seconds: CollectiveSeconds
    row_wise_seconds: CollectiveSeconds
    syncs: Syncs = DENSE

    @property
    def demands(self) -> list[TableDemand]:
        return [table.demand for table in self.tables]

    @property
    def memory_ratio(self) -> float:
        """Return the memory per rank divided by the memory with TorchRec's row-wise sharding."""
        return self.memory_bytes / self.row_wise_memory_bytes


def plan_tiers(
    tables: Sequence[TableDemand],
    cluster: ClusterShape,
    strategy: Strategy,
    options: CostOptions | None = None,
) -> TierPlan:
    """Choose the rows of ``tables`` to copy, with one memory budget for all tables.

    The strategy ``two_tier`` copies rows to every rank, ``three_tier`` also to every node,
    ``joint`` finds the fastest combination of both, and ``row_wise`` copies nothing. See FlexShard,
    arXiv 2301.02959, section 4. ``three_tier`` needs several nodes.

    Raises:
        SetupError: the tables do not fit into the budget.
    """
    model = _model(tables, cluster, options or CostOptions())
    if strategy == "row_wise":
        cuts = Cuts(model.ranking.first(0), model.ranking.first(0))
    else:
        ways = {"two_tier": model.two_tier, "three_tier": model.three_tier, "joint": model.joint}
        cuts = ways[strategy]()
    return _plan(tables, model, strategy, cuts)


def on_cluster(plan: TierPlan, cluster: ClusterShape) -> TierPlan:
    """Return a copy of ``plan`` with costs estimated for ``cluster``."""
    model = _model(plan.demands, cluster, plan.options)
    hot, both = sum(t.hot for t in plan.tables), sum(t.hot + t.flex for t in plan.tables)
    cuts = Cuts(model.ranking.first(hot), model.ranking.first(both))
    return _plan(plan.demands, model, plan.strategy, cuts)


def _model(tables: Sequence[TableDemand], cluster: ClusterShape, options: CostOptions) -> CutModel:
    groups = None
    if options.sync != "dense":
        groups = (CopyGroup.hot(cluster), CopyGroup.flex(cluster))
    ranking = Ranking(tables, cluster.batch_size, options.coalesce, groups)
    return CutModel(ranking, cluster, options)


def _plan(
    tables: Sequence[TableDemand], model: CutModel, strategy: Strategy, cuts: Cuts
) -> TierPlan:
    ranking, hot, flex = model.ranking, cuts.hot, cuts.flex
    ranges = ((hot, None), (flex, hot), (ranking.everything, flex))
    ones = np.ones(len(ranking.keys))
    rows = [ranking.by_table(ones, *each) for each in ranges[:2]]
    sent = [ranking.by_table(ranking.keys, *each) for each in ranges]
    exchanged = [[0.0] * len(tables)] * 2
    if ranking.groups is not None:
        exchanged = [
            ranking.by_table(ranking.exchanged(group), *each)
            for group, each in zip(ranking.groups, ranges, strict=False)
        ]
    tiers = []
    for index, demand in enumerate(tables):
        num_hot, num_flex = (round(of_tier[index]) for of_tier in rows)
        length = demand.length or 1.0
        hot_share = demand.accesses(num_hot) / length
        tiers.append(
            TableTiers(
                demand,
                num_hot,
                num_flex,
                hot_share,
                demand.accesses(num_hot + num_flex) / length - hot_share,
                *(of_tier[index] for of_tier in (*sent, *exchanged)),
            )
        )
    return TierPlan(
        tables=tuple(tiers),
        cluster=model.cluster,
        options=model.options,
        strategy=strategy,
        a2a_reduction=model.a2a_reduction(cuts),
        memory_bytes=model.memory(cuts),
        row_wise_memory_bytes=model.plain_memory,
        seconds=model.seconds(cuts),
        row_wise_seconds=model.plain_seconds,
        syncs=model.syncs_of(cuts),
    )


@dataclass(frozen=True)
class TierTraffic:
    """Predicted bytes that a rank sends per step for one tier of rows, averaged over ranks.

    A tier consists of rows that are copied to every rank, copied to every node, or not copied.

    Attributes:
        collective: kind of collective. ``sparse`` exchanges only gradients of looked-up rows.
        group: ranks that communicate. ``global`` is all ranks, ``node`` the ranks of a node, and
            ``cross`` one rank of each node.
        integer_bytes: bytes of ids, lengths, sizes, and bitmaps of looked-up rows.
        float_bytes: bytes of embeddings and gradients, forward and backward.
        seconds: time estimated by the cost model.
    """

    collective: Literal["all_to_all", "all_reduce", "sparse"]
    group: Literal["global", "node", "cross"]
    integer_bytes: float
    float_bytes: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.integer_bytes + self.float_bytes


def cold_size_bytes(plan: TierPlan) -> int:
    """Return the bytes of the message with tensor sizes that a rank sends before the ids."""
    return 3 * ID_BYTES * (plan.cluster.world_size - 1)


def flex_size_bytes(plan: TierPlan) -> int:
    """Return the bytes of id counts that a rank sends in its node, for rows copied to nodes."""
    if not any(table.flex for table in plan.tables):
        return 0
    features = sum(demand.features for demand in plan.demands)
    return features * ID_BYTES * (plan.cluster.ranks_per_node - 1)


def traffic(plan: TierPlan) -> dict[Tier, TierTraffic]:
    """Predict the bytes sent per step for each tier of rows.

    The keys are ``cold`` (rows that are not copied), ``hot`` (copied to every rank), ``flex`` and
    ``flex_gradients`` (embeddings and gradients of rows copied to every node).

    Assumes that ids are spread evenly, so each of n ranks sends (n - 1) / n of its ids to other
    ranks. Assumes that all tables are in one EmbeddingCollection. Each rank gets the lengths of all
    lists, or one length per feature with coalescing.
    """
    cluster, options, tables, seconds = plan.cluster, plan.options, plan.tables, plan.seconds
    ranks, node = cluster.world_size, cluster.ranks_per_node

    def scalars(rows: Callable[[TableTiers], float]) -> float:
        return sum(t.demand.embedding_dim * rows(t) for t in tables)

    def gradients(
        name: Literal["global", "cross"],
        group: CopyGroup,
        sync: Sync,
        rows: Callable[[TableTiers], float],
        exchanged: Callable[[TableTiers], float],
        taken: float,
    ) -> TierTraffic:
        if sync == "dense":
            num_bytes = group.sent_of_reduced * SCALAR_BYTES * scalars(rows)
            return TierTraffic("all_reduce", name, 0.0, num_bytes, taken)
        num_bytes = group.sent_of_reduced * options.wire_bytes * scalars(exchanged)
        return TierTraffic("sparse", name, group.bits(sum(map(rows, tables))), num_bytes, taken)

    lists = sum(
        d.features * (1 if options.coalesce else cluster.batch_size / d.dedupe_factor)
        for d in plan.demands
    )
    others, in_node = (ranks - 1) / ranks, (node - 1) / node
    cold_ids = ID_BYTES * sum(t.cold_sent for t in tables)
    flex_ids = ID_BYTES * sum(t.flex_sent for t in tables)
    return {
        "cold": TierTraffic(
            "all_to_all",
            "global",
            others * cold_ids + (ranks - 1) * LENGTH_BYTES * lists + cold_size_bytes(plan),
            others * options.row_wise_bytes * scalars(lambda t: t.cold_sent),
            seconds.a2a_global,
        ),
        "hot": gradients(
            "global",
            CopyGroup.hot(cluster),
            plan.syncs.hot,
            lambda t: t.hot,
            lambda t: t.hot_exchanged,
            seconds.ar_global,
        ),
        "flex": TierTraffic(
            "all_to_all",
            "node",
            in_node * flex_ids + flex_size_bytes(plan),
            in_node * options.flex_bytes * scalars(lambda t: t.flex_sent),
            seconds.a2a_intra,
        ),
        "flex_gradients": gradients(
            "cross",
            CopyGroup.flex(cluster),
            plan.syncs.flex,
            lambda t: t.flex / node,
            lambda t: t.flex_exchanged / node,
            seconds.ar_cross,
        ),
    }
