"""A small sequence model, its data, and the same training with tiers and without."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugin_flexshard.runtime import (
    RowTiers,
    ShardedTieredEmbeddingCollection,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)
from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.sharding.sharders import fused_params, stock_sharders
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.rank_state import copy_weights

Optimizer = Literal["sgd", "rowwise_adagrad"]
DIM = 4
GLOBAL_BATCH = 8
MAX_LENGTH = 4
# Two features look table a up; c never has tiers.
ROWS = {"a": 40, "b": 23, "c": 9}
FEATURES = {"a": ["f", "g"], "b": ["h"], "c": ["k"]}
TIERS = {
    "a": RowTiers(hot=[0, 7, 3], flex=[1, 39, 20, 2, 8]),
    "b": RowTiers(hot=[5, 22], flex=[0, 1]),
}


@dataclass
class Sequences(Pipelineable):
    ids: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Sequences:
        return Sequences(self.ids.to(device, non_blocking), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        self.ids.record_stream(stream)
        self.labels.record_stream(stream)


class Model(nn.Module):
    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        self.sequences = collection
        self.head = nn.Linear(4 * DIM, 1)

    def forward(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        output = self.head(pool(self.sequences(batch.ids))).squeeze(1)
        loss = ((output - batch.labels) ** 2).mean()
        return loss, loss.detach()


@torch.fx.wrap
def pool(sequences: Mapping[str, JaggedTensor]) -> Tensor:
    """Each sequence's rows count by their place, so that their order matters."""
    place = torch.arange(1.0, MAX_LENGTH + 1).view(1, -1, 1) / MAX_LENGTH
    rows = [sequences[name].to_padded_dense(MAX_LENGTH) for name in ("f", "g", "h", "k")]
    return torch.cat([(each * place).sum(1) for each in rows], dim=1)


def build_collection(rows: Mapping[str, int]) -> EmbeddingCollection:
    """The same weights every time."""
    torch.manual_seed(3)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, embedding_dim=DIM, num_embeddings=rows[name], feature_names=features
            )
            for name, features in FEATURES.items()
        ]
    )


def make_batch(rank: int, world_size: int, step: int, drift: int = 0) -> Sequences:
    """This rank's part of the step's global batch, which is the same on any number of ranks.

    Few rows are read often: the first ones, and ``drift`` rows further on after every sixth step.
    """
    random = torch.Generator().manual_seed(100 + step)
    count = GLOBAL_BATCH // world_size
    mine = range(rank * count, (rank + 1) * count)
    names = [(table, name) for table, features in FEATURES.items() for name in features]
    lists: list[Tensor] = []
    lengths: list[int] = []
    for table, _ in names:
        for sample in range(GLOBAL_BATCH):
            length = int(torch.randint(0, MAX_LENGTH + 1, (1,), generator=random))
            uniform = torch.rand(length, generator=random)
            ids = (uniform**3 * ROWS[table]).long() + drift * (step // 6)
            if sample in mine:
                lists.append(ids % ROWS[table])
                lengths.append(length)
    labels = torch.randn(GLOBAL_BATCH, generator=random)
    kjt = KeyedJaggedTensor(
        keys=[name for _, name in names], values=torch.cat(lists), lengths=torch.tensor(lengths)
    )
    return Sequences(kjt, labels[mine.start : mine.stop])


def training_spec(optimizer: Optimizer) -> TrainingSpec:
    # Adagrad's first steps are as long as the rate whatever the gradient, rounding errors included.
    rate = 0.05 if optimizer == "sgd" else 0.01
    return TrainingSpec(optimizer=optimizer, learning_rate=rate, eps=1e-8)


class Job:
    """A model sharded over the ranks that run it, with tiers or, given none, by TorchRec alone."""

    def __init__(
        self,
        optimizer: Optimizer,
        tiers: Mapping[str, RowTiers] | None,
        *,
        retier_every: int | None = None,
        rows: Mapping[str, int] = ROWS,
    ) -> None:
        training = training_spec(optimizer)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        collection = build_collection(rows)
        sharders = stock_sharders(training)
        if tiers is not None:
            # Both ways to sum gradients of copies, over the two optimizers.
            sparse: tuple[CopyTier, ...] = ("hot", "flex") if optimizer == "sgd" else ("flex",)
            collection = TieredEmbeddingCollection(collection, tiers, retier_every, sparse)
            sharders = [TieredEmbeddingCollectionSharder(fused_params(training))]
        model = Model(collection)
        nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(4))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sharder = next(each for each in sharders if each.module_type is type(collection))
        plan = construct_module_sharding_plan(
            collection,
            {
                name: table_wise(rank=self.world_size - 1, compute_kernel="fused")
                if name == "c"
                else row_wise(compute_kernel="fused")
                for name in FEATURES
            },
            sharder,
            local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            world_size=self.world_size,
            device_type="cpu",
        )
        self.dmp = DistributedModelParallel(
            module=model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"sequences": plan}),
            sharders=sharders,
        )
        state = self.dmp.state_dict()
        copy_weights(state, weights)
        self.dmp.load_state_dict(state)
        self.optimizer: CombinedOptimizer = build_optimizer(self.dmp, training)
        self.pipeline = TrainPipelineSparseDist(
            self.dmp, self.optimizer, torch.device("cpu"), execute_all_batches=True
        )

    @property
    def tiered(self) -> ShardedTieredEmbeddingCollection:
        module = self.dmp.module.sequences
        assert isinstance(module, ShardedTieredEmbeddingCollection)
        return module

    def train(self, steps: range, *, drift: int = 0, pipelined: bool = False) -> list[Tensor]:
        """The losses of this rank's samples."""
        batches = [make_batch(self.rank, self.world_size, step, drift) for step in steps]
        if pipelined:
            iterator = iter(batches)
            return [self.pipeline.progress(iterator) for _ in batches]
        return [self.train_on(batch) for batch in batches]

    def train_on(self, batch: Sequences) -> Tensor:
        """The loss of one batch."""
        self.optimizer.zero_grad()
        loss, result = self.dmp(batch)
        loss.backward()
        self.optimizer.step()
        return result

    @torch.no_grad()
    def evaluate(self, step: int, *, pipelined: bool = False) -> Tensor:
        """The loss of this rank's samples. A pipeline has to be empty."""
        batch = make_batch(self.rank, self.world_size, step)
        self.dmp.eval()
        result: Tensor = self.pipeline.progress(iter([batch])) if pipelined else self.dmp(batch)[1]
        self.dmp.train()
        return result

    def save(self, folder: Path, step: int) -> None:
        Checkpoints(folder, keep=9).save(self.dmp, self.optimizer, Progress(step))

    def load(self, folder: Path) -> int:
        return Checkpoints(folder, keep=9).load(self.dmp, self.optimizer).step

    def everything(self) -> dict[str, Tensor]:
        """All weights and optimizer state, whole, by name."""
        found = {f"model/{name}": value for name, value in self.dmp.state_dict().items()}
        for name, states in self.optimizer.state_dict()["state"].items():
            for key, value in states.items():
                if isinstance(value, Tensor | ShardedTensor):
                    found[f"optimizer/{name}/{key}"] = value
        return whole(found)


def whole(found: Mapping[str, Tensor | ShardedTensor]) -> dict[str, Tensor]:
    """All rows of each, on every rank, bit for bit. A rank may lack what it holds no rows of."""
    sizes = {
        name: value.metadata().size if isinstance(value, ShardedTensor) else value.shape
        for name, value in found.items()
    }
    of_ranks: list[dict[str, torch.Size]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, sizes)
    results = {}
    for name, size in sorted(
        {name: size for sizes in of_ranks for name, size in sizes.items()}.items()
    ):
        value = found.get(name)
        if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
            results[name] = value.detach().clone()
            continue
        results[name] = torch.zeros(size)
        for shard in [] if value is None else value.local_shards():
            start, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            results[name][start : start + rows] = shard.tensor.detach()
        dist.all_reduce(results[name].view(torch.int32))
    return results


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of tensors of the same names and shapes."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name in one:
        assert one[name].shape == other[name].shape, name
    return max(float((one[name] - other[name]).abs().max()) for name in one)
