"""Which rows of which tables go into which tier, and what that comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recd_plugin_flexshard.planning.cluster import ClusterShape, CollectiveSeconds
from recd_plugin_flexshard.planning.costs import CostOptions
from recd_plugin_flexshard.planning.cuts import CutModel, Cuts
from recd_plugin_flexshard.planning.demand import TableDemand
from recd_plugin_flexshard.planning.joint import joint
from recd_plugin_flexshard.planning.ranking import Ranking, TableRanking
from recd_plugin_flexshard.planning.sync import DENSE, CopyGroup, Syncs
from recd_plugins.api import SetupError

Strategy = Literal["row_wise", "data_parallel", "two_tier", "three_tier", "joint"]


@dataclass(frozen=True)
class TableTiers:
    """The tiers of a table: its ``hot`` most accessed rows, then ``flex`` rows, the rest cold.

    ``..._sent``: rows of a tier that the batch of a rank looks up (``costs.rows_sent``).
    ``..._exchanged``: rows of a tier whose all-reduce sends as much as their sparse sync; of dense
    plans not known. ``..._share``: the tier's of the table's accesses; with no access at all they
    are 0, 0 and 1.
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
        return 1.0 - self.hot_share - self.flex_share

    @property
    def shares_sent(self) -> tuple[float, float, float]:
        """Of the ids that a batch looks up, those of hot, flex and cold rows.

        Coalesced, an id counts once a batch, and of rows that are read most often it counts less
        than of the table's accesses.
        """
        sent = (self.hot_sent, self.flex_sent, self.cold_sent)
        total = sum(sent)
        return (sent[0] / total, sent[1] / total, sent[2] / total) if total else (0.0, 0.0, 1.0)

    @property
    def hot_rows(self) -> NDArray[np.int64]:
        """The data-parallel rows, most accessed first."""
        return self.demand.ids(0, self.hot)

    @property
    def flex_rows(self) -> NDArray[np.int64]:
        """The rows of the flex tier, most accessed first."""
        return self.demand.ids(self.hot, self.hot + self.flex)


@dataclass(frozen=True)
class TierPlan:
    """Tiers of tables, with what the cost model says of them.

    ``memory_bytes`` are those of these tables and their activations on a rank, ``row_wise_...`` the
    same of plain row-wise sharding, without deduplication and coalescing but with the same dtypes.
    ``syncs`` is how gradients of copies are summed.
    """

    tables: tuple[TableTiers, ...]
    cluster: ClusterShape
    options: CostOptions
    strategy: Strategy
    a2a_reduction: float  # share of plain row-wise sharding's bytes in the global all-to-all saved
    memory_bytes: float
    row_wise_memory_bytes: float
    seconds: CollectiveSeconds
    row_wise_seconds: CollectiveSeconds
    syncs: Syncs = DENSE


# Of plans with the share of gradients that the one before has: on PAPERCAL a third changes it by
# 0.2 % at most.
_ROUNDS = 2


def plan_tiers(
    tables: Sequence[TableDemand],
    cluster: ClusterShape,
    strategy: Strategy,
    options: CostOptions | None = None,
    share_of: Callable[[TierPlan], float] | None = None,
) -> TierPlan:
    """Choose the tiers of ``tables`` together (FlexShard, arXiv 2301.02959, section 4).

    ``row_wise`` and ``data_parallel`` are the two ends, whatever memory they take; the others keep
    to the budget of ``options``. Raises ``SetupError`` where that cannot be kept, where
    ``three_tier`` is asked for on one node, and for unknown strategies.

    ``share_of``: the ``gradient_share`` of a plan, in place of that of ``options``: it depends on
    which rows are cold, and these on it.
    """
    options = options or CostOptions()
    ranking = _ranking(tables, cluster, options)

    def planned(options: CostOptions) -> TierPlan:
        model = CutModel(ranking, cluster, options)
        return _plan(tables, model, strategy, _cuts(model, strategy))

    plan = planned(options)
    if share_of is None:
        return plan
    for _ in range(_ROUNDS):
        share = share_of(plan)
        if share == plan.options.gradient_share:
            break
        plan = planned(replace(options, gradient_share=share))
    return plan


def plan_curve(
    tables: Sequence[TableDemand],
    cluster: ClusterShape,
    strategy: Strategy,
    each: Iterable[CostOptions],
) -> Iterator[TierPlan]:
    """The same for ``each`` of some options, in less time than one by one."""
    for _, alike in groupby(each, key=lambda options: (options.coalesce, options.sync == "dense")):
        first, *others = alike
        ranking = _ranking(tables, cluster, first)
        for options in (first, *others):
            model = CutModel(ranking, cluster, options)
            yield _plan(tables, model, strategy, _cuts(model, strategy))


def on_cluster(plan: TierPlan, cluster: ClusterShape, gradient_share: float = 1.0) -> TierPlan:
    """The tiers of ``plan``, and what they take and send on another cluster.

    ``gradient_share``: see ``CostOptions``; of that cluster.
    """
    options = replace(plan.options, gradient_share=gradient_share)
    tables = [table.demand for table in plan.tables]
    ranking = _ranking(tables, cluster, options)
    hot = [table.hot for table in plan.tables]
    flex = [table.hot + table.flex for table in plan.tables]
    cuts = Cuts(ranking.prefix(hot), ranking.prefix(flex))
    return _plan(tables, CutModel(ranking, cluster, options), plan.strategy, cuts)


def pareto_curve(
    tables: Sequence[TableDemand],
    cluster: ClusterShape,
    strategy: Strategy,
    options: CostOptions,
    memory_ratios: Sequence[float],
) -> list[TierPlan]:
    """Plans at budgets of ``memory_ratios`` of plain row-wise sharding's memory."""
    budgets = [replace(options, memory_ratio=ratio, memory_bytes=None) for ratio in memory_ratios]
    return list(plan_curve(tables, cluster, strategy, budgets))


def two_tier_curve(
    tables: Sequence[TableDemand],
    cluster: ClusterShape,
    options: CostOptions,
    hot_rows: Sequence[int],
) -> list[TierPlan]:
    """Plans with the ``hot_rows`` most accessed rows data-parallel, whatever memory they take."""
    model = CutModel(_ranking(tables, cluster, options), cluster, options)
    ends = [model.ranking.first(num_rows) for num_rows in hot_rows]
    return [_plan(tables, model, "two_tier", Cuts(end, end)) for end in ends]


#: The points of FlexShard's figure 5, in the order of their data-parallel rows.
POINTS = ("least_memory", "memory_neutral", "least_communication", "data_parallel")


def four_points(
    tables: Sequence[TableDemand], cluster: ClusterShape, options: CostOptions
) -> dict[str, TierPlan]:
    """The two-tier plans by name of ``POINTS`` (FlexShard, figure 5).

    ``memory_neutral`` has the most data-parallel rows that take no more memory than plain row-wise
    sharding; ``least_communication`` those that take less time there, whatever memory: with dense
    syncs, unless the options allow sparse ones alone.
    """
    neutral = replace(options, memory_ratio=1.0, memory_bytes=None)
    model = CutModel(_ranking(tables, cluster, options), cluster, neutral)
    of_first_sync = model.with_each_syncs[0]
    ends = (
        model.ranking.above(model.costs.mem_dp_rw),
        model.hot_that_fit[1],
        model.ranking.above(of_first_sync.comm_dp_rw),
        model.ranking.everything,
    )
    return {
        name: _plan(tables, model, "two_tier", Cuts(end, end))
        for name, end in zip(POINTS, ends, strict=True)
    }


def _ranking(tables: Sequence[TableDemand], cluster: ClusterShape, options: CostOptions) -> Ranking:
    if not tables:
        raise SetupError("there is no table to plan tiers for")
    groups = (CopyGroup.hot(cluster), CopyGroup.flex(cluster)) if options.sync != "dense" else ()
    return Ranking(tables, cluster.batch_size, options.coalesce, groups)


def _cuts(model: CutModel, strategy: Strategy) -> Cuts:
    ends = {"row_wise": model.ranking.nothing, "data_parallel": model.ranking.everything}
    if strategy in ends:
        return Cuts(ends[strategy], ends[strategy])
    ways = {"two_tier": CutModel.two_tier, "three_tier": CutModel.three_tier, "joint": joint}
    if strategy not in ways:
        raise SetupError(f"strategy is one of {', '.join([*ends, *ways])}, not {strategy!r}")
    return ways[strategy](model)


def _plan(
    tables: Sequence[TableDemand], model: CutModel, strategy: Strategy, cuts: Cuts
) -> TierPlan:
    return TierPlan(
        tables=tuple(
            _table_tiers(demand, ranking, hot, flex)
            for demand, ranking, hot, flex in zip(
                tables, model.ranking.tables, cuts.hot.rows, cuts.flex.rows, strict=True
            )
        ),
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


def _table_tiers(demand: TableDemand, ranking: TableRanking, hot: int, flex: int) -> TableTiers:
    """``hot`` and ``flex``: where these tiers end."""
    length = demand.length
    shares = [demand.accesses(end) / length if length else 0.0 for end in (hot, flex)]
    sent = [ranking.sent(end) for end in (hot, flex, ranking.num_rows)]
    exchanged = [0.0, 0.0]
    if of_both := ranking.exchanged(hot):
        until = ranking.exchanged(flex)
        exchanged = [of_both[0], max(0.0, until[1] - of_both[1])]
    return TableTiers(
        demand=demand,
        hot=hot,
        flex=flex - hot,
        hot_share=shares[0],
        flex_share=shares[1] - shares[0],
        hot_sent=sent[0],
        flex_sent=max(0.0, sent[1] - sent[0]),
        cold_sent=max(0.0, sent[2] - sent[1]),
        hot_exchanged=exchanged[0],
        flex_exchanged=exchanged[1],
    )
