"""Plans for a table like RM-2's, scaled down, and the ranks that play them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from recd_plugin_flexshard.benchmarks.popularity import FEATURE, Popularity, scaled
from recd_plugin_flexshard.planning import (
    ClusterShape,
    Strategy,
    TableDemand,
    TierPlan,
    paper,
    plan_tiers,
)
from recd_plugin_flexshard.runtime import RowTiers
from recd_plugins.api.access import TableCounter

#: Nodes, and ranks of each, that play the plans.
NODES, RANKS_PER_NODE = 4, 2
_IDS_A_DRAW = 1 << 20


@dataclass(frozen=True)
class Scaled:
    """How RM-2's table is made small.

    Attributes:
        scale: rows of the table and samples of a batch are fewer by this factor, a divisor of both.
        embedding_dim: scalars a row.
        profiled: samples that the measured access profile has seen.
        nodes: that play the plans.
    """

    scale: int
    embedding_dim: int
    profiled: int
    nodes: int = NODES

    @property
    def batch_size(self) -> int:
        """Samples of a rank."""
        return paper.CLUSTER.batch_size // self.scale

    @property
    def planned(self) -> ClusterShape:
        """The paper's cluster with the smaller batch."""
        return replace(paper.CLUSTER, batch_size=self.batch_size)

    @property
    def played(self) -> ClusterShape:
        """The ranks of this machine."""
        return replace(self.planned, nodes=self.nodes, ranks_per_node=RANKS_PER_NODE)

    def popularity(self) -> Popularity:
        """RM-2's, of shuffled rows."""
        return Popularity.shuffled(scaled(paper.MODELS["RM-2"].fitted(), self.scale), seed=0)


@dataclass(frozen=True)
class Plans:
    """Plans of one table by the name of a side, all of the paper's memory-neutral kind.

    Attributes:
        by_side: as planned.
        row_wise: no tiers, on the ranks that train.
        played: the ranks that train.
    """

    by_side: Mapping[str, TierPlan]
    row_wise: TierPlan
    played: ClusterShape

    def of_played(self, side: str) -> TierPlan:
        """The same tiers, on the ranks that train: what ``traffic`` predicts is theirs."""
        return replace(self.by_side[side], cluster=self.played)


TWO_TIER, THREE_TIER = "2-tier", "3-tier"
PROFILED = "3-tier, profiled"
SMALL_CLUSTER = "3-tier, for 4 x 2"


def make_plans(size: Scaled, popularity: Popularity) -> Plans:
    """Plans of the popularity itself, and of a profile measured on samples nobody trains on."""
    known = TableDemand(
        FEATURE,
        popularity.num_embeddings,
        size.embedding_dim,
        popularity.probabilities,
        popularity.rows,
    )
    measured = measured_demand(size, popularity)
    planned = size.planned
    small = replace(planned, nodes=NODES, ranks_per_node=RANKS_PER_NODE)
    plans: dict[str, tuple[TableDemand, ClusterShape, Strategy]] = {
        TWO_TIER: (known, planned, "two_tier"),
        THREE_TIER: (known, planned, "three_tier"),
        PROFILED: (measured, planned, "three_tier"),
        SMALL_CLUSTER: (known, small, "three_tier"),
    }
    by_side = {side: plan_tiers([d], c, s, paper.OPTIONS) for side, (d, c, s) in plans.items()}
    return Plans(by_side, plan_tiers([known], size.played, "row_wise"), size.played)


def row_tiers(plan: TierPlan) -> RowTiers:
    """The tiers of the one table of a plan."""
    (table,) = plan.tables
    return RowTiers(table.hot_rows, table.flex_rows)


def measured_demand(size: Scaled, popularity: Popularity) -> TableDemand:
    """What an access profile of ``size.profiled`` samples says."""
    counter = TableCounter(popularity.num_embeddings)
    rng = np.random.default_rng(2)
    left = size.profiled
    while left:
        samples = min(left, max(1, round(_IDS_A_DRAW / popularity.length)))
        counter.add(popularity.draw(rng, samples))
        left -= samples
    access = counter.access(FEATURE, (FEATURE,), popularity.num_embeddings, size.profiled)
    return TableDemand.from_access(access, size.embedding_dim)
