"""What each rank does: the same batches through one table, without and with tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from recd_plugin_flexshard.benchmarks.one_table import shard
from recd_plugin_flexshard.benchmarks.popularity import Popularity
from recd_plugin_flexshard.benchmarks.trainers import RankTrainer, from_every_rank, timed_turns
from recd_plugin_flexshard.runtime import RowTiers, tier_groups
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.distributed import Traffic
from recd_plugins.testing.benchmark import keep_freed_memory

#: The group of what is not sent by a tier.
WITHOUT_TIERS = "all ranks"
#: Where the all-to-alls between all ranks are.
COLD = (WITHOUT_TIERS, "cold")


@dataclass(frozen=True)
class Job:
    """What is trained; travels to the ranks by pickle.

    Attributes:
        popularity: of the ids.
        embedding_dim: scalars a row.
        batch_size: samples of a rank.
        num_batches: of a rank; every side trains on all of them.
        turns: timed turns of one step of each side.
        sides: tiers by name; None is TorchRec's own row-wise sharding.
    """

    popularity: Popularity
    embedding_dim: int
    batch_size: int
    num_batches: int
    turns: int
    sides: Mapping[str, RowTiers | None]


@dataclass(frozen=True)
class Trained:
    """One side.

    Attributes:
        sent: bytes that a rank sends in a step, the mean over ranks; groups are tiers.
        imbalance: cold embeddings that the rank with most sends, over the mean.
        losses: by step, the mean over ranks.
        seconds: of a step, by turn.
    """

    sent: Mapping[Traffic, float]
    imbalance: float
    losses: list[float]
    seconds: list[float]


def measure(rank: int, world_size: int, job: Job) -> dict[str, Trained]:  # noqa: ARG001
    """Train every side, in turns. A collective call."""
    silence_upstream()
    keep_freed_memory()
    rng = np.random.default_rng((1, rank))
    batches = [job.popularity.batch(rng, job.batch_size) for _ in range(job.num_batches)]
    trainers = {
        name: RankTrainer(*shard(job.popularity.num_embeddings, job.embedding_dim, tiers), batches)
        for name, tiers in job.sides.items()
    }
    sent = {name: by_tier(trainer.counted_round()) for name, trainer in trainers.items()}
    seconds = timed_turns(trainers, job.turns)
    return {
        name: Trained(
            sent=mean_over_ranks(sent[name]),
            imbalance=_imbalance(from_every_rank(sent[name])),
            losses=trainer.losses(),
            seconds=seconds[name],
        )
        for name, trainer in trainers.items()
    }


def by_tier(sent: Mapping[Traffic, float]) -> Counter[Traffic]:
    """The same with tiers in place of groups, whose names other ranks do not know."""
    names = tier_groups().names
    total: Counter[Traffic] = Counter()
    for traffic, num in sent.items():
        tier = names.get(traffic.group, WITHOUT_TIERS)
        total[replace(traffic, group=tier)] += num  # type: ignore[assignment]
    return total


def mean_over_ranks(sent: Counter[Traffic]) -> dict[Traffic, float]:
    """What a rank sends. A collective call."""
    ranks = from_every_rank(sent)
    return {traffic: num / len(ranks) for traffic, num in sum(ranks, Counter()).items()}


def all_to_all_bytes(sent: Mapping[Traffic, float]) -> float:
    """Bytes of the all-to-alls between all ranks: ids and lengths, embeddings and gradients."""
    return sum(
        num
        for traffic, num in sent.items()
        if traffic.kind == "all_to_all" and traffic.group in COLD
    )


def _imbalance(ranks: list[Counter[Traffic]]) -> float:
    """Of the embeddings that a rank looks up for the others, the largest over the mean."""
    sent = [
        sum(
            num
            for traffic, num in rank.items()
            if traffic.kind == "all_to_all"
            and traffic.group in COLD
            and (traffic.phase, traffic.payload) == ("forward", "floats")
        )
        for rank in ranks
    ]
    return max(sent) / (sum(sent) / len(sent))
