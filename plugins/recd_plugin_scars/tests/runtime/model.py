"""The parity model with cached tables and without, and its training on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from tests.distributed.parity_model import Form, ParityModel, Parts, make_batch
from tests.sharded import PLACES, shard
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.types import CacheParams

from recd_plugin_scars.runtime.kernel import CachedKernels
from recd_plugin_scars.runtime.policies import CachePolicy, TableCache
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.data.row_pipeline import lower
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
    sharding: str
    form: Form
    optimizer: Optimizer


@dataclass(frozen=True)
class Case:
    """Every policy has a table of each module, and every table every policy in one of three turns.

    One of the two modules has its rows in a file, the other one in memory.
    """

    training: Training
    rows: Rows = "some"
    lookahead: bool = True
    turn: int = 0
    coalesced: bool = False
    uncached: tuple[str, ...] = ()

    def policy(self, table: str) -> CachePolicy:
        return POLICIES[(int(table[1]) + self.turn) % len(POLICIES)]

    def in_file(self, table: str) -> bool:
        return (table[0] == "b") == (self.turn % 2 == 0)

    def caches(self, folder: Path) -> dict[str, TableCache]:
        return {
            table.name: self._cache(table.name, table.num_embeddings, folder)
            for table in tables_of(ParityModel(PARTS))
            if table.name not in self.uncached
        }

    def _cache(self, table: str, num_embeddings: int, folder: Path) -> TableCache:
        num_cached = {"none": 0, "one": 1, "some": num_embeddings // 3, "all": num_embeddings}
        policy, share = self.policy(table), num_cached[self.rows] / num_embeddings
        # The last rows are hot, so that slots and rows do not agree by chance.
        hot = None if policy == "lru" else np.arange(num_embeddings)[::-1].copy()
        place = folder if self.in_file(table) else None
        return TableCache(policy, share, hot_rows=hot, folder=place, lookahead=self.lookahead)


@dataclass(frozen=True)
class Run:
    losses: list[float]
    state: dict[str, Tensor]


class Trainer:
    def __init__(
        self, training: Training, case: Case | None, folder: Path, *, with_weights: bool = True
    ) -> None:
        self.rank, self.training = dist.get_rank(), training
        caches = {} if case is None else case.caches(folder)
        model = ParityModel(PARTS)
        name = training.optimizer
        spec = TrainingSpec(optimizer=name, learning_rate=LEARNING_RATE[name], eps=1e-8)
        coalesced = case is not None and case.coalesced
        unique = [table.name for table in tables_of(model)] if coalesced else []
        kinds = (ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder)
        sharders: list[Any] = [
            kind(fused_params(spec), kernels=[CachedKernels(caches)], coalesced=unique)
            for kind in kinds
        ]
        places = {
            table.name: _place(index, table.name, training.sharding, caches)
            for module in model.children()
            for index, table in enumerate(tables_of(module))
        }
        self.dmp = shard(model, sharders, places, with_weights=with_weights)
        self.optimizer = build_optimizer(self.dmp, spec)

    def batch(self, step: int) -> ModelInput:
        return lower(make_batch(self.rank, step, form=self.training.form), PARTS.placement)

    def start(self, step: int = 0) -> None:
        self.pipeline = build_train_pipeline(self.dmp, self.optimizer, DEVICE)
        self._batches = self._endless(step)

    def _endless(self, step: int) -> Iterator[ModelInput]:
        while True:
            yield self.batch(step % 8)
            step += 1

    def steps(self, number: int = 3) -> list[float]:
        return [float(self.pipeline.progress(self._batches)[0]) for _ in range(number)]

    def run(self) -> Run:
        return Run(self.steps(), self.state())

    def evaluate(self, step: int) -> Tensor:
        self.dmp.eval()
        with torch.no_grad():
            _, (_, output) = self.dmp(self.batch(step).to(DEVICE))
        self.dmp.train()
        return output

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.dmp.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.dmp.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def state(self, *, optimizer_first: bool = False) -> dict[str, Tensor]:
        def of_model() -> dict[str, Tensor]:
            return {name: _local(value) for name, value in self.dmp.state_dict().items()}

        def of_optimizer() -> dict[str, Tensor]:
            return {
                f"{parameter}/{name}": _local(value)
                for parameter, values in self.optimizer.state_dict()["state"].items()
                for name, value in values.items()
            }

        return of_optimizer() | of_model() if optimizer_first else of_model() | of_optimizer()


def on_both(
    rank: int, world_size: int, case: Case, procedure: Callable[[Trainer], Run]
) -> list[Run]:
    with tempfile.TemporaryDirectory() as folder:
        return [procedure(Trainer(case.training, own, Path(folder))) for own in (None, case)]


def _place(index: int, table: str, sharding: str, caches: Mapping[str, TableCache]) -> Any:
    def placed(*arguments: Any) -> Any:
        found = PLACES[sharding](index, dist.get_world_size())(*arguments)
        if table in caches:
            share = caches[table].load_factor
            found.compute_kernel = "fused_uvm_caching"
            found.cache_params = CacheParams(load_factor=share, prefetch_pipeline=True)
        return found

    return placed


def _local(value: Any) -> Tensor:
    if not isinstance(value, ShardedTensor):
        return torch.as_tensor(value).detach().cpu().clone()
    shards = [shard.tensor.detach().cpu().flatten() for shard in value.local_shards()]
    return torch.cat(shards) if shards else torch.zeros(0)
