"""Training with lookahead on one rank: what happens when, and what goes on after a failure."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from tests.sharded import bags, local_ranks, local_weights, plan_of, sequences, sharded
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)
from recd_plugin_scars.runtime.kernel import CachedKernels, cached_kernels
from recd_plugin_scars.runtime.policies import TableCache
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.sharding.pipeline import OverlappedTrainPipeline, build_train_pipeline
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    fused_params,
)
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.optimizer import build_optimizer

NUM_ROWS = 64
DIM = 8
BATCH_SIZE = 4
IDS = 3
TRAINING = TrainingSpec(optimizer="sgd", learning_rate=0.2)

Pipeline = Literal["none", "ours", "overlapped", "stock"]


class Failure(Exception):
    """Of a step."""


class Model(nn.Module):
    """Bags and sequences, which may be cached, and a collection with tiers beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = bags("bag", rows=NUM_ROWS, dim=DIM)
        self.sequences = sequences("sequence", rows=NUM_ROWS, dim=DIM)
        tiered = sequences("tier", rows=NUM_ROWS, dim=DIM)
        self.tiered = TieredEmbeddingCollection(tiered, {"t_tier": RowTiers(hot=np.arange(8))})
        self.head = Head()

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        bag = self.bags(batch.sparse_features)["bag"]
        sequence = self.sequences(batch.sequence_features)["sequence"].values()
        tier = self.tiered(batch.replicated_features)["tier"].values()
        loss = self.head(bag, sequence, tier, batch.labels)
        return loss, loss.detach()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(3 * DIM, 1)
        self.events: list[str] = []  # forward and backward passes, by number
        self.fails: str | None = None  # one of them
        self._step = 0

    def forward(self, bag: Tensor, sequence: Tensor, tier: Tensor, labels: Tensor) -> Tensor:
        step, self._step = self._step, self._step + 1
        self._happens(f"forward {step}")
        rows = [bag, *(each.view(-1, IDS, DIM).sum(1) for each in (sequence, tier))]
        loss: Tensor = (self.top(torch.cat(rows, dim=1)).squeeze(1) - labels).square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda _: self._happens(f"backward {step}"))
        return loss

    def _happens(self, event: str) -> None:
        self.events.append(event)
        if event == self.fails:
            raise Failure(event)


@dataclass(frozen=True)
class Run:
    losses: list[float]
    state: dict[str, Tensor]
    pipeline: str
    num_pinned: int


def run(
    rank: int,
    world_size: int,
    kind: Pipeline,
    cache: TableCache | None,
    fails: str | None = None,
    on_one_rank: bool = False,
    rates: Sequence[float] = (),
) -> Run:
    """Train; after a failure go on with the batch that follows it.

    Tables are row-wise, or all on the first rank but the one with tiers.
    """
    dmp, optimizer = shard(world_size, cache, on_one_rank)
    head_of(dmp).fails = fails
    pipeline = pipeline_of(kind, dmp, optimizer)
    batches = [batch_of(rank, step).to(DEVICE) for step in range(8)]
    losses: list[float] = []
    iterator = iter(batches)
    while True:
        try:
            losses.append(float(_step(pipeline, dmp, optimizer, iterator)))
            for group in optimizer.param_groups if rates else ():
                group["lr"] = rates[len(losses) % len(rates)]
            dmp.state_dict()  # as checkpoints do, when rows may be looked up ahead
        except Failure:
            pipeline.reset()
            iterator = iter(batches[len(losses) + 1 :])
        except StopIteration:
            break
    gc.collect()
    state = local_weights(dmp)
    pinned = sum(int((kernel._rows._pool.pins > 0).sum()) for kernel in cached_kernels(dmp))
    return Run(losses, state, type(pipeline).__name__, pinned)


def batch_of(rank: int, step: int) -> ModelInput:
    """Every batch needs rows that the one before has not, and shares some with it."""
    random = torch.Generator().manual_seed(10 * step + rank)
    first = 7 * step
    ids = (first + torch.randint(0, 12, (BATCH_SIZE * IDS,), generator=random)) % NUM_ROWS

    def features(key: str) -> KeyedJaggedTensor:
        return KeyedJaggedTensor([key], ids, lengths=torch.full((BATCH_SIZE,), IDS))

    return ModelInput(
        torch.zeros(BATCH_SIZE, 0),
        features("bag"),
        torch.randn(BATCH_SIZE, generator=random),
        replicated_features=features("tier"),
        sequence_features=features("sequence"),
    )


def shard(
    world_size: int, cache: TableCache | None = None, on_one_rank: bool = False
) -> tuple[DistributedModelParallel, Any]:
    model = Model()
    caches = {} if cache is None else {"t_bag": cache, "t_sequence": cache}
    params = fused_params(TRAINING)
    sharders: list[ModuleSharder[Any]] = [
        ExactEmbeddingBagCollectionSharder(dict(params), kernels=[CachedKernels(caches)]),
        ExactEmbeddingCollectionSharder(dict(params), kernels=[CachedKernels(caches)]),
        TieredEmbeddingCollectionSharder(dict(params)),
    ]
    places: dict[str, Any] = {}
    for table in ("t_bag", "t_sequence", "t_tier"):
        kernel = "fused_uvm_caching" if table in caches else "fused"
        alone = on_one_rank and table != "t_tier"
        place = table_wise(rank=0, compute_kernel=kernel) if alone else None
        places[table] = place or row_wise(compute_kernel=kernel)
    plan = {}
    for name, sharder in zip(("bags", "sequences", "tiered"), sharders, strict=True):
        plan[name] = plan_of(getattr(model, name), places, sharder, world_size, local_ranks())
        for table in plan[name].keys() & caches.keys():
            plan[name][table].cache_params = CacheParams(prefetch_pipeline=True)
    dmp = sharded(model, ShardingPlan(plan), sharders)
    dmp.load_state_dict(dmp.state_dict())  # tiers have copies of rows
    return dmp, build_optimizer(dmp, TRAINING)


def pipeline_of(kind: Pipeline, dmp: nn.Module, optimizer: Any) -> Any:
    if kind == "none":
        return None
    if kind == "ours":
        return build_train_pipeline(dmp, optimizer, DEVICE)
    if kind == "overlapped":
        return OverlappedTrainPipeline(dmp, optimizer, DEVICE)
    return TrainPipelineSparseDist(dmp, optimizer, DEVICE, execute_all_batches=True)


def _step(pipeline: Any, dmp: nn.Module, optimizer: Any, batches: Iterator[ModelInput]) -> Tensor:
    if pipeline is not None:
        return pipeline.progress(batches)
    batch = next(batches)
    optimizer.zero_grad()
    loss, _ = dmp(batch)
    loss.backward()
    optimizer.step()
    return loss


def head_of(dmp: nn.Module) -> Head:
    return next(module for module in dmp.modules() if isinstance(module, Head))
