"""What choosing the tiers' rows anew regains where popularity moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recd_plugin_flexshard.benchmarks.one_table import shard
from recd_plugin_flexshard.benchmarks.one_table_plans import (
    THREE_TIER,
    Scaled,
    make_plans,
    row_tiers,
)
from recd_plugin_flexshard.benchmarks.one_table_ranks import by_tier
from recd_plugin_flexshard.benchmarks.trainers import RankTrainer, from_every_rank
from recd_plugin_flexshard.runtime import RowTiers
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.distributed import Ranks
from recd_plugins.testing.benchmark import Detail, Figure

#: Each phase, this share of the rows change places among each other.
MOVED = 0.2


@dataclass(frozen=True)
class Job:
    """Phases of a moving popularity; travels to the ranks by pickle.

    Attributes:
        scaled: the table.
        tiers: planned for the first phase.
        phases: after each of which the popularity moves.
        retier_every: steps; a phase has twice as many.
    """

    scaled: Scaled
    tiers: RowTiers
    phases: int
    retier_every: int


@dataclass(frozen=True)
class Drift:
    """The share of the ids that go to the cold tier, by phase, in the phase's second half."""

    stay: list[float]
    follow: list[float]

    @property
    def regained(self) -> float:
        """The regained share of what the tiers that stay have lost in the last phase."""
        return (self.stay[-1] - self.follow[-1]) / (self.stay[-1] - self.stay[0])

    def figures(self) -> list[Figure]:
        return [
            Figure.of("retier_a2a_share_regained", [self.regained], unit="share", better="higher")
        ]

    def details(self) -> list[Detail]:
        rows: list[list[str | float]] = [
            [f"{phase}", stay, follow]
            for phase, (stay, follow) in enumerate(zip(self.stay, self.follow, strict=True))
        ]
        return [
            Detail(
                f"popularity moves: {MOVED:.0%} of the rows change places in each phase; share of "
                "the row-wise all-to-all's bytes that is left",
                ["phase", "tiers stay", "retier_every"],
                rows,
            )
        ]


def measure_drift(ranks: Ranks, size: Scaled, phases: int, retier_every: int) -> Drift:
    """Train on a moving popularity, with tiers that stay and with tiers that follow."""
    popularity = size.popularity()
    plan = make_plans(size, popularity).by_side[THREE_TIER]
    job = Job(size, row_tiers(plan), phases, retier_every)
    stay, follow = ranks.run(cold_shares, job)[0]
    return Drift(stay, follow)


def cold_shares(rank: int, world_size: int, job: Job) -> list[list[float]]:
    """Cold shares by phase, for tiers that stay and for tiers that follow. A collective call."""
    silence_upstream()
    return [_train(rank, world_size, job, every) for every in (None, job.retier_every)]


def _train(rank: int, world_size: int, job: Job, retier_every: int | None) -> list[float]:
    popularity, size = job.scaled.popularity(), job.scaled
    dmp, optimizer = shard(popularity.num_embeddings, size.embedding_dim, job.tiers, retier_every)
    rng = np.random.default_rng((3, rank))
    batches = []
    for phase in range(job.phases):
        for _ in range(2 * job.retier_every):
            batches.append(popularity.batch(rng, size.batch_size))
        popularity = popularity.swapped(MOVED, seed=phase)
    trainer = RankTrainer(dmp, optimizer, batches)
    # Embeddings and their gradients, of the ids that are on other ranks.
    row_wise = trainer.num_ids * size.embedding_dim * 4 * 2 * (world_size - 1) / world_size
    shares = []
    for _ in range(job.phases):
        for _ in range(job.retier_every):
            trainer.step()
        sent = by_tier(trainer.counted_steps(job.retier_every - 1))
        trainer.step()  # may look up the first batch of the next phase already
        cold = sum(
            num
            for traffic, num in sent.items()
            if (traffic.group, traffic.kind, traffic.payload) == ("cold", "all_to_all", "floats")
        )
        shares.append(sum(from_every_rank(cold / row_wise)) / world_size)
    return shares
