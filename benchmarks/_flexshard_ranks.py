"""Trains tables with FlexShard's row tiers and row-wise sharded tables on the same batches."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ModuleSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks._measure import from_every_rank
from benchmarks._ranks import RankTrainer, first_batches, shard, start_rank
from recd_plugin_flexshard.planning import TableDemand
from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
    tier_groups,
)
from recd_plugins.api import Pooling
from recd_plugins.config import ModelSpec, TrainingSpec
from recd_plugins.config.from_file import load_registry
from recd_plugins.config.manager import installed_plugin
from recd_plugins.interfaces.batch import ModelInput, Placement
from recd_plugins.interfaces.model_tables import table_name
from recd_plugins.model.dlrm import DLRM
from recd_plugins.sharding.byte_counter import CollectiveBytes, Traffic
from recd_plugins.sharding.gradient_dedup import all_gradients_sent
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import fused_params, stock_sharders
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.sharded_model import build_sharded_model

FEATURE = "history"
# The variant that uses TorchRec's sharder without tiers.
STOCK = "row-wise (TorchRec)"
_CPU = torch.device("cpu")
_NUM_DENSE = 4
# Name for collectives that belong to no tier.
_WITHOUT_TIERS = "all ranks"
# Small rates: larger ones amplify rounding errors, and losses are compared.
_TRAINING = TrainingSpec(learning_rate=0.02, dense_learning_rate=0.01, eps=1e-3)


@dataclass(frozen=True)
class Popularity:
    """Access frequency of each row of one table.

    Attributes:
        probabilities: float64 ``[E]``, expected accesses per sample in descending order. Values
            can exceed 1.
        rows: int64 ``[E]``, the table row of each probability.
    """

    probabilities: NDArray[np.float64]
    rows: NDArray[np.int64]

    @classmethod
    def scaled(cls, demand: TableDemand, scale: int) -> Popularity:
        """Return the popularity of a smaller table: each row replaces ``scale`` rows of ``demand``.

        If the batch size is also divided by ``scale``, all ratios of bytes in a plan stay the same.
        """
        repeats = np.ones(len(demand.probabilities)) if demand.repeats is None else demand.repeats
        rows = np.append(0, np.cumsum(repeats))
        reads = np.append(0, np.cumsum(repeats * demand.probabilities))
        ends = np.arange(0, demand.num_embeddings + 1, scale)
        # Sort, because rounding can reorder neighbours of equal probability.
        probabilities = np.sort(np.diff(np.interp(ends, rows, reads)))[::-1]
        return cls(probabilities, np.random.default_rng(0).permutation(len(probabilities)))

    @property
    def length(self) -> float:
        return float(self.probabilities.sum())

    def swapped(self, share: float, seed: int) -> Popularity:
        """Return a copy in which a random ``share`` of the rows exchange their popularity."""
        rng = np.random.default_rng(seed)
        moving = np.flatnonzero(rng.random(len(self.rows)) < share)
        rows = self.rows.copy()
        rows[moving] = rows[rng.permutation(moving)]
        return Popularity(self.probabilities, rows)

    def batch(self, rng: np.random.Generator, samples: int) -> ModelInput:
        """Draw a random batch with one sequence feature. Labels are correlated with its ids."""
        num_ids = rng.poisson(samples * self.length)
        ids = self.rows[np.searchsorted(self._cumulative, rng.random(num_ids), side="right")]
        lengths = np.bincount(rng.integers(0, samples, len(ids)), minlength=samples)
        effects = np.add.reduceat(np.append(_effects(ids), 0), np.cumsum(lengths) - lengths)
        noise = rng.normal(size=samples)
        labels = np.where(lengths > 0, effects, 0) / np.sqrt(np.maximum(lengths, 1)) + noise > 0
        return ModelInput(
            dense_features=torch.from_numpy(rng.random((samples, _NUM_DENSE), np.float32)),
            sparse_features=None,
            labels=torch.from_numpy(labels.astype(np.float32)),
            sequence_features=KeyedJaggedTensor(
                keys=[FEATURE],
                values=torch.from_numpy(ids),
                lengths=torch.from_numpy(lengths.astype(np.int32)),
            ),
            num_unique={FEATURE: samples},
        )

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        cumulative = np.cumsum(self.probabilities)
        return cumulative[:-1] / cumulative[-1]


def _effects(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a fixed effect between -1 and 1 for each id, from which labels are drawn."""
    hashed = (ids.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    return (hashed >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1


@dataclass
class Trained:
    """Results of one variant over all ranks.

    Attributes:
        sent: bytes sent per step, averaged over ranks and keyed by collective and row tier.
        seconds: wall time of a step, one value per turn.
        losses: loss of each step, averaged over ranks.
    """

    sent: Mapping[Traffic, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def all_to_all(self) -> float:
        """Bytes of ids, lengths, embeddings and gradients in all-to-alls between all ranks."""
        return sum(
            num
            for traffic, num in self.sent.items()
            if traffic.kind == "all_to_all" and traffic.group in (_WITHOUT_TIERS, "cold")
        )


@dataclass(frozen=True)
class OneTable:
    """Job that trains one table, with row-wise sharding and with row tiers.

    ``batch_size`` and ``num_batches`` are per rank. A timed turn has one step of each variant.
    ``sides`` maps the name of a variant to its row tiers; None means TorchRec's row-wise sharding.
    """

    popularity: Popularity
    embedding_dim: int
    batch_size: int
    num_batches: int
    turns: int
    sides: Mapping[str, RowTiers | None]


def measure_one_table(rank: int, world_size: int, job: OneTable) -> dict[str, Trained]:
    """Train every variant of a job, in alternating turns. Collective."""
    start_rank()
    rng = np.random.default_rng((1, rank))
    batches = [job.popularity.batch(rng, job.batch_size) for _ in range(job.num_batches)]
    trainers = {
        name: RankTrainer(
            _pipeline(len(job.popularity.rows), job.embedding_dim, tiers), batches, _CPU
        )
        for name, tiers in job.sides.items()
    }
    return _train(trainers, job.turns)


@dataclass(frozen=True)
class Sessions:
    """Job that trains sequence features of synthetic sessions, with a registry file per variant."""

    registries: Mapping[str, Path]
    num_batches: int
    turns: int


def measure_sessions(rank: int, world_size: int, job: Sessions) -> dict[str, Trained]:
    """Train every variant of a job, in alternating turns. Collective."""
    start_rank()
    trainers: dict[str, RankTrainer] = {}
    for name, path in job.registries.items():
        registry = load_registry(path)
        sharders = stock_sharders(registry.training) if name == STOCK else None
        with all_gradients_sent():  # as FlexShard's paper counts
            parts = build_sharded_model(registry, "plugins", _CPU, sharders=sharders)
        parts.dmp.train()
        pipeline = build_train_pipeline(parts.dmp, parts.optimizer, _CPU)
        trainers[name] = RankTrainer(pipeline, first_batches(parts, _CPU, job.num_batches), _CPU)
    return _train(trainers, job.turns)


def _train(trainers: Mapping[str, RankTrainer], turns: int) -> dict[str, Trained]:
    """Count the bytes that each variant sends, then time their steps in alternating turns."""
    trained = {name: Trained() for name in trainers}
    for name, trainer in trainers.items():
        trainer.steps(1)  # fills the pipeline, so that each batch is then counted once
        ranks = from_every_rank(_by_tier(trainer, len(trainer.batches)))
        total = sum(ranks, Counter[Traffic]())
        trained[name].sent = {traffic: num / len(ranks) for traffic, num in total.items()}
    # All objects so far are permanent, so the garbage collector need not scan them.
    gc.collect()
    gc.disable()
    for turn in range(turns + 1):
        for name, trainer in trainers.items():
            seconds = trainer.turn(1, warmup=0)
            if turn:
                trained[name].seconds.append(seconds)
    gc.enable()
    for name, trainer in trainers.items():
        trained[name].losses = trainer.losses()
    return trained


def _by_tier(trainer: RankTrainer, steps: int) -> Counter[Traffic]:
    """Return the bytes that this rank sends per step, keyed by collective and row tier."""
    with CollectiveBytes() as counter:
        trainer.steps(steps)
    names = tier_groups().names
    sent: Counter[Traffic] = Counter()
    for traffic, num in counter.sent.items():
        tier = names.get(traffic.group, _WITHOUT_TIERS)
        sent[replace(traffic, group=tier)] += num / steps
    return sent


@dataclass(frozen=True)
class Drift:
    """Job that trains one table while the popularity of its rows changes.

    ``tiers`` are planned for the first phase. A phase has ``2 * retier_every`` steps. After it, a
    fraction ``moved`` of the rows exchange their popularity.
    """

    popularity: Popularity
    embedding_dim: int
    batch_size: int
    tiers: RowTiers
    phases: int
    retier_every: int
    moved: float = 0.2


def measure_drift(rank: int, world_size: int, job: Drift) -> tuple[list[float], list[float]]:
    """Measure the share of bytes sent to cold rows, with fixed tiers and with updated tiers.

    Returns:
        The shares with fixed tiers, one per phase, and the shares with updated tiers. Collective.
    """
    start_rank()
    return _cold_shares(rank, job, None), _cold_shares(rank, job, job.retier_every)


def _cold_shares(rank: int, job: Drift, retier_every: int | None) -> list[float]:
    popularity = job.popularity
    rng, batches = np.random.default_rng((3, rank)), []
    for phase in range(job.phases):
        batches += [popularity.batch(rng, job.batch_size) for _ in range(2 * job.retier_every)]
        popularity = popularity.swapped(job.moved, seed=phase)
    pipeline = _pipeline(len(popularity.rows), job.embedding_dim, job.tiers, retier_every)
    trainer = RankTrainer(pipeline, batches, _CPU)
    sequences = [batch.sequence_features for batch in batches]
    ids = sum(kjt.values().numel() for kjt in sequences if kjt is not None) / len(batches)
    ranks = dist.get_world_size()
    # Bytes of embeddings and gradients for ids whose rows are on other ranks.
    row_wise = ids * job.embedding_dim * 4 * 2 * (ranks - 1) / ranks
    shares = []
    for _ in range(job.phases):
        trainer.steps(job.retier_every)
        sent = _by_tier(trainer, job.retier_every - 1)
        trainer.steps(1)  # prefetching may already look up the first batch of the next phase
        cold = sum(
            num
            for traffic, num in sent.items()
            if (traffic.group, traffic.kind, traffic.payload) == ("cold", "all_to_all", "floats")
        )
        shares.append(sum(from_every_rank(cold / row_wise)) / ranks)
    return shares


def _pipeline(
    rows: int, dim: int, tiers: RowTiers | None, retier_every: int | None = None
) -> object:
    """Return a train pipeline of a model with one table and the same initial weights each time.

    Without ``tiers``, TorchRec's row-wise sharder shards the table. ``retier_every`` is the number
    of steps between updates of the tiers; None keeps the tiers.
    """
    torch.manual_seed(_TRAINING.seed)
    model = DLRM(
        ModelSpec(embedding_dim=dim, num_embeddings=rows),
        _NUM_DENSE,
        Placement(sequence=(FEATURE,)),
    )
    assert model.sequences is not None, "the placement has a sequence"
    assert model.sequence_pooling is not None, "the placement has a sequence"
    pooling = installed_plugin("pooling", "recd.mean")
    assert isinstance(pooling, Pooling)
    model.sequence_pooling.put(FEATURE, pooling)
    params, table = fused_params(_TRAINING), table_name(FEATURE)
    sharder: ModuleSharder[torch.nn.Module]
    if tiers is None:
        sharder = EmbeddingCollectionSharder(params)
    else:
        model.sequences = TieredEmbeddingCollection(model.sequences, {table: tiers}, retier_every)
        sharder = TieredEmbeddingCollectionSharder(params)
    with all_gradients_sent():  # as FlexShard's paper counts
        dmp = shard(model, "sequences", {table: row_wise(compute_kernel="fused")}, sharder, _CPU)
    dmp.train()
    return build_train_pipeline(dmp, build_optimizer(dmp, _TRAINING), _CPU)
