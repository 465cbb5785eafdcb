"""One cell of the parity matrix on one rank: the same training with cached tables and without."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from tests.distributed.parity_model import Form, ParityModel, Parts, make_batch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugin_scars.runtime.kernel import CachedKernels, cache_traffic, reset_cache_traffic
from recd_plugin_scars.runtime.row_cache import CacheTraffic
from recd_plugin_scars.runtime.spec import CachePolicy, TableCache
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.data.lower import lower
from recd_plugins.interfaces import TrainPipeline
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    fused_params,
)
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.rank_state import copy_weights

SHARDINGS = ("table_wise", "row_wise", "column_wise")
POLICIES: tuple[CachePolicy, ...] = ("static", "lru", "lfu")
FORMS: tuple[Form, ...] = ("plain", "unique")
PARTS = Parts(pooled=True, replicated=False, sequence=True)
LEARNING_RATE = {"sgd": 0.2, "rowwise_adagrad": 0.02}

Optimizer = Literal["sgd", "rowwise_adagrad"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "rowwise_adagrad")
Rows = Literal["none", "one", "some", "all"]
ROWS: tuple[Rows, ...] = ("none", "one", "some", "all")


@dataclass(frozen=True)
class Training:
    """What the plain tables share with the cached ones."""

    sharding: str
    form: Form
    optimizer: Optimizer


@dataclass(frozen=True)
class Case:
    """Every policy has a table of each module, and every table every policy in one of three turns.

    One of the two modules has its rows in a file, the other one in memory.
    """

    training: Training
    rows: Rows
    lookahead: bool
    turn: int
    # Whether the cached tables' ids are made unique before they are sent.
    coalesced: bool = False
    uncached: tuple[str, ...] = ()

    def policy(self, table: str) -> CachePolicy:
        return POLICIES[(int(table[1]) + self.turn) % len(POLICIES)]

    def in_file(self, table: str) -> bool:
        return (table[0] == "b") == (self.turn % 2 == 0)

    def caches(self, folder: Path) -> dict[str, TableCache]:
        tables = tables_of(ParityModel(PARTS))
        return {
            table.name: self._cache(table.name, table.num_embeddings, folder)
            for table in tables
            if table.name not in self.uncached
        }

    def _cache(self, table: str, num_embeddings: int, folder: Path) -> TableCache:
        num_cached = {"none": 0, "one": 1, "some": num_embeddings // 3, "all": num_embeddings}
        policy = self.policy(table)
        # The last rows are hot, so that slots and rows do not agree by chance.
        hot_rows = np.arange(num_embeddings)[::-1].copy()
        return TableCache(
            policy,
            num_cached[self.rows] / num_embeddings,
            hot_rows=None if policy == "lru" else hot_rows,
            folder=folder if self.in_file(table) else None,
            lookahead=self.lookahead,
        )


@dataclass(frozen=True)
class Trained:
    """What a run leaves on one rank: outputs of steps, and states in the middle and at the end."""

    outputs: list[Tensor]
    states: list[dict[str, Tensor]]


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences on one rank, and what its caches did."""

    output: float
    in_flight: float
    end: float
    moved: float
    traffic: dict[str, CacheTraffic]
    written_by_evaluation: int


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Difference]:
    """Several in one launch, which takes longer than a case."""
    return [run_case(rank, world_size, case) for case in cases]


def run_case(rank: int, world_size: int, case: Case) -> Difference:
    plain = _plain(rank, world_size, case.training)
    with tempfile.TemporaryDirectory() as folder:
        dmp, optimizer = shard(
            case.training, world_size, case.caches(Path(folder)), coalesced=case.coalesced
        )
        reset_cache_traffic(dmp)
        cached = train(dmp, optimizer, case.training, rank)
        traffic = cache_traffic(dmp)
        reset_cache_traffic(dmp)
        _evaluate(dmp, _batch(rank, 3, case.training))
        written = sum(each.bytes_written for each in cache_traffic(dmp).values())
    in_flight, end = (
        max(_distance(state[name], other[name]) for name in other)
        for state, other in zip(cached.states, plain.states, strict=True)
    )
    return Difference(
        output=max(_distance(*pair) for pair in zip(cached.outputs, plain.outputs, strict=True)),
        in_flight=in_flight,
        end=end,
        moved=max(_distance(plain.states[1][name], each) for name, each in plain.states[0].items()),
        traffic=traffic,
        written_by_evaluation=written,
    )


def shard(
    training: Training,
    world_size: int,
    caches: Mapping[str, TableCache],
    *,
    with_weights: bool = True,
    coalesced: bool = False,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The parity model and its optimizer; ``with_weights`` of its own, else those of sharding."""
    model = ParityModel(PARTS)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spec = TrainingSpec(
        optimizer=training.optimizer, learning_rate=LEARNING_RATE[training.optimizer], eps=1e-8
    )
    params = fused_params(spec)
    unique = [table.name for table in tables_of(model)] if coalesced else []
    sharders: list[ModuleSharder[Any]] = [
        ExactEmbeddingBagCollectionSharder(
            dict(params), kernels=[CachedKernels(caches)], coalesced=unique
        ),
        ExactEmbeddingCollectionSharder(
            dict(params), kernels=[CachedKernels(caches)], coalesced=unique
        ),
    ]
    dmp = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=DEVICE,
        plan=_plan(model, training.sharding, world_size, sharders, caches),
        sharders=sharders,
    )
    if with_weights:
        state = dmp.state_dict()
        copy_weights(state, weights)
        dmp.load_state_dict(state)
    return dmp, build_optimizer(dmp, spec)


def train(
    dmp: DistributedModelParallel, optimizer: CombinedOptimizer, training: Training, rank: int
) -> Trained:
    """Two epochs and three evaluations: with batches in flight, by the pipeline, and after."""
    batches = [_batch(rank, step, training) for step in range(4)]
    pipeline = build_train_pipeline(dmp, optimizer, DEVICE)
    outputs: list[Tensor] = []
    first = iter([*batches, batches[1]])
    outputs += _progress(pipeline, first, 2)
    states = [local_state(dmp, optimizer)]
    pipeline.detach()
    outputs += _evaluate(dmp, batches[3])
    outputs += _progress(pipeline, first)
    dmp.eval()
    with torch.no_grad():
        outputs += _progress(pipeline, iter(batches[2:]))
    dmp.train()
    outputs += _progress(pipeline, iter([batches[2], batches[0], batches[3]]))
    pipeline.detach()
    outputs += _evaluate(dmp, batches[0])
    return Trained(outputs, [*states, local_state(dmp, optimizer, optimizer_first=True)])


def local_state(
    dmp: DistributedModelParallel, optimizer: CombinedOptimizer, *, optimizer_first: bool = False
) -> dict[str, Tensor]:
    """Copies of this rank's weights and optimizer state, from one state dict after the other."""

    def of_model() -> dict[str, Tensor]:
        return {name: _local(value) for name, value in dmp.state_dict().items()}

    def of_optimizer() -> dict[str, Tensor]:
        return {
            f"{parameter}/{name}": _local(value)
            for parameter, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }

    return of_optimizer() | of_model() if optimizer_first else of_model() | of_optimizer()


def _batch(rank: int, step: int, training: Training) -> ModelInput:
    return lower(make_batch(rank, step, form=training.form), PARTS.placement)


@functools.cache
def _plain(rank: int, world_size: int, training: Training) -> Trained:
    return train(*shard(training, world_size, {}), training, rank)


def _plan(
    model: nn.Module,
    sharding: str,
    world_size: int,
    sharders: list[ModuleSharder[Any]],
    caches: Mapping[str, TableCache],
) -> ShardingPlan:
    def generator(index: int, table: str) -> Any:
        kernel = "fused_uvm_caching" if table in caches else "fused"
        if sharding == "table_wise":
            return table_wise(rank=index % world_size, compute_kernel=kernel)
        if sharding == "row_wise":
            return row_wise(compute_kernel=kernel)
        ranks = [(index + shard) % world_size for shard in range(2)]
        return column_wise(ranks=ranks, compute_kernel=kernel)

    plan = {
        name: construct_module_sharding_plan(
            module,
            {
                table.name: generator(index, table.name)
                for index, table in enumerate(tables_of(module))
            },
            sharder,
            local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            world_size=world_size,
            device_type=DEVICE.type,
        )
        for name, module in model.named_children()
        for sharder in sharders
        if isinstance(module, sharder.module_type)
    }
    for tables in plan.values():
        for table, each in tables.items():
            if table in caches:
                each.cache_params = CacheParams(
                    load_factor=caches[table].load_factor, prefetch_pipeline=True
                )
    return ShardingPlan(plan)


def _progress(
    pipeline: TrainPipeline, batches: Iterator[ModelInput], steps: int | None = None
) -> list[Tensor]:
    """Outputs of some steps, or of all that are left."""
    outputs = []
    while steps is None or len(outputs) < steps:
        try:
            _, output = pipeline.progress(batches)
        except StopIteration:
            break
        outputs.append(output)
    return outputs


def _evaluate(dmp: DistributedModelParallel, batch: ModelInput) -> list[Tensor]:
    dmp.eval()
    with torch.no_grad():
        _, (_, output) = dmp(batch.to(DEVICE))
    dmp.train()
    return [output]


def _local(value: Any) -> Tensor:
    if not isinstance(value, ShardedTensor):
        return torch.as_tensor(value).detach().cpu().clone()
    shards = [shard.tensor.detach().cpu().flatten() for shard in value.local_shards()]
    return torch.cat(shards) if shards else torch.zeros(0)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0
