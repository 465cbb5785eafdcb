"""A table like RM-2's: what was sent, against what was predicted and what the paper measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recd_plugin_flexshard.benchmarks.one_table_plans import (
    PROFILED,
    SMALL_CLUSTER,
    THREE_TIER,
    TWO_TIER,
    Plans,
    Scaled,
    make_plans,
    row_tiers,
)
from recd_plugin_flexshard.benchmarks.one_table_ranks import (
    Job,
    Trained,
    all_to_all_bytes,
    measure,
)
from recd_plugin_flexshard.benchmarks.popularity import Popularity
from recd_plugin_flexshard.planning import TierTraffic, traffic
from recd_plugin_flexshard.runtime import RowTiers
from recd_plugins.api.distributed import Ranks
from recd_plugins.testing.benchmark import Detail, Figure

STOCK = "row-wise (TorchRec)"
#: What the sharders' kernels change without any tier.
SHARDERS = "row-wise (ours)"
TIER_TABLE = "rm2: kB that a rank sends in a step, by tier"


def measure_one_table(ranks: Ranks, size: Scaled, num_batches: int, turns: int) -> OneTable:
    """Plan, and train on the same batches without tiers and under every plan.

    Args:
        ranks: of the played cluster.
        size: of the table.
        num_batches: of a rank.
        turns: timed turns of one step of each side.
    """
    popularity = size.popularity()
    plans = make_plans(size, popularity)
    sides = {STOCK: None, SHARDERS: RowTiers()}
    sides |= {side: row_tiers(plan) for side, plan in plans.by_side.items()}
    job = Job(popularity, size.embedding_dim, size.batch_size, num_batches, turns, sides)
    return OneTable(popularity, plans, ranks.run(measure, job)[0])


@dataclass(frozen=True)
class OneTable:
    """Plans and what came of them, by side."""

    popularity: Popularity
    plans: Plans
    trained: Mapping[str, Trained]

    def measured(self, side: str) -> float:
        """Share of the bytes of stock row-wise's all-to-all that are saved."""
        stock = all_to_all_bytes(self.trained[STOCK].sent)
        return 1 - all_to_all_bytes(self.trained[side].sent) / stock

    def predicted(self, side: str) -> float:
        """The same by the model of traffic."""
        row_wise = traffic(self.plans.row_wise)["cold"].bytes
        return 1 - traffic(self.plans.of_played(side))["cold"].bytes / row_wise

    def times(self, side: str) -> list[float]:
        """Seconds of a step over those of stock row-wise, by turn."""
        pairs = zip(self.trained[side].seconds, self.trained[STOCK].seconds, strict=True)
        return [ours / stock for ours, stock in pairs]

    def figures(self) -> list[Figure]:
        """The figures of all sides."""
        return [
            self._reduction("rm2_a2a_reduction", THREE_TIER, paper=0.856, goal=0.856),
            self._reduction("rm2_a2a_reduction_2_tier", TWO_TIER, paper=0.77),
            self._reduction("rm2_a2a_reduction_profiled", PROFILED),
            self._reduction("rm2_a2a_reduction_planned_for_4x2", SMALL_CLUSTER),
            self._error("prediction_error", [TWO_TIER, THREE_TIER, PROFILED], goal=0.02),
            self._error("prediction_error_known_popularity", [TWO_TIER, THREE_TIER]),
            Figure.of(
                "prediction_error_tier_bytes",
                [
                    max(
                        abs(observed / predicted.bytes - 1)
                        for side, _, observed, predicted in self._tiers()
                        if side != PROFILED
                    )
                ],
                unit="share",
                better="lower",
            ),
        ]

    @property
    def loss_max_abs_diff(self) -> float:
        """Between stock row-wise and any side."""
        losses = np.array([trained.losses for trained in self.trained.values()])
        return float(np.abs(losses - losses[0]).max())

    def reduction_table(self) -> Detail:
        """The table of reductions by side."""
        rows: list[list[str | float]] = []
        for side in self.trained:
            shares: list[str | float] = ["0", "0", "", "", "0"]
            if side in self.plans.by_side:
                (table,) = self.plans.by_side[side].tables
                covered = table.hot_share + table.flex_share
                shares = [
                    f"{table.hot:,}",
                    f"{table.flex:,}",
                    f"{covered:.1%}",
                    f"{self.predicted(side):.1%}",
                    f"{self.measured(side):.1%}",
                ]
            rows.append([side, *shares, f"{np.median(self.times(side)):.2f}"])
        return Detail(
            "rm2: all-to-all saved",
            ["", "hot rows", "flex rows", "covered", "predicted", "measured", "step time"],
            rows,
        )

    def tier_table(self) -> Detail:
        """Bytes by tier."""
        return Detail(
            TIER_TABLE,
            ["", "collective", "observed", "predicted", "observed/predicted"],
            [
                [
                    f"{side}: {tier}",
                    f"{predicted.collective}, {predicted.group}",
                    observed / 1e3,
                    predicted.bytes / 1e3,
                    observed / predicted.bytes,
                ]
                for side, tier, observed, predicted in self._tiers()
            ],
        )

    def imbalance_table(self) -> Detail:
        """How unevenly the cold tier's embeddings come from the ranks."""
        return Detail(
            "rm2: cold embeddings that the rank with most sends, over the mean",
            ["", "observed, rows shuffled", "expected", "expected, rows by popularity"],
            [
                [
                    side,
                    trained.imbalance,
                    *self._expected_imbalance(side),
                ]
                for side, trained in self.trained.items()
            ],
        )

    def details(self) -> list[Detail]:
        """All tables."""
        return [self.reduction_table(), self.tier_table(), self.imbalance_table()]

    def notes(self) -> list[str]:
        """What the scaling changes."""
        most = self.popularity.probabilities[0] / self.popularity.length
        return [
            "rm2: the first rows of RM-2 are one row of the scaled table, the most read one with "
            f"{most:.1%} of all accesses; so row-wise is more uneven here than for RM-2 itself"
        ]

    def _expected_imbalance(self, side: str) -> tuple[float, float]:
        """With the rows as they are, and with rows by popularity in their place."""
        first = 0
        if side in self.plans.by_side:
            (table,) = self.plans.by_side[side].tables
            first = table.hot + table.flex
        size = self.popularity.num_embeddings
        ranks = self.plans.played.world_size
        # TorchRec splits rows into blocks of this many.
        block = -(-size // ranks)
        cold = np.where(np.arange(size) < first, 0, self.popularity.probabilities)
        by_order = []
        for rows in (self.popularity.rows, np.arange(size)):
            sent = np.bincount(rows // block, weights=cold, minlength=ranks)
            by_order.append(float(sent.max() / sent.mean()))
        return by_order[0], by_order[1]

    def _tiers(self) -> list[tuple[str, str, float, TierTraffic]]:
        """Side, tier, bytes observed and predicted, of all tiers that send anything."""
        found: list[tuple[str, str, float, TierTraffic]] = []
        for side in self.plans.by_side:
            for tier, predicted in traffic(self.plans.of_played(side)).items():
                observed = sum(
                    num
                    for each, num in self.trained[side].sent.items()
                    if (each.group, each.kind) == (tier, predicted.collective)
                )
                if predicted.bytes:
                    found.append((side, tier, observed, predicted))
        return found

    def _reduction(
        self, name: str, side: str, *, paper: float | None = None, goal: float | None = None
    ) -> Figure:
        return Figure.of(
            name, [self.measured(side)], unit="share", better="higher", paper=paper, goal=goal
        )

    def _error(self, name: str, sides: list[str], *, goal: float | None = None) -> Figure:
        worst = max(abs(self.measured(side) - self.predicted(side)) for side in sides)
        return Figure.of(name, [worst], unit="share", better="lower", goal=goal)
