from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tests.distributed.parity_model import DIM, _Attention, _Head
from tests.sharded import shard, whole
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import CommOp, QuantizedCommCodecs
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import (
    RowTiers,
    ShardedTieredEmbeddingCollection,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)
from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.data.row_pipeline import lower
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.sharding.gradient_dedup import all_gradients_sent
from recd_plugins.sharding.guards import check_every_parameter_is_trained
from recd_plugins.sharding.sharders import fused_params, stock_sharders
from recd_plugins.sharding.wire import Int8, wire_codecs
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.training.checkpoint import Checkpoints, Progress
from recd_plugins.training.optimizer import build_optimizer

Optimizer = Literal["sgd", "rowwise_adagrad"]
Form = Literal["kjt", "ikjt"]
Tiers = Mapping[str, RowTiers]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "rowwise_adagrad")
COPIES: tuple[CopyTier, ...] = ("hot", "flex")
# Two features look table a up; c never has tiers, and the last of four ranks has no row of d.
FEATURES = {"a": ("f", "g"), "b": ("h",), "c": ("k",), "d": ("m",)}
ROWS = {"a": 40, "b": 23, "c": 9, "d": 5}
# Most read first, which is no order of rows.
TIERS: dict[str, Tiers] = {
    "two": {"a": RowTiers([7, 0, 22]), "b": RowTiers([3, 11, 1, 4]), "d": RowTiers()},
    "three": {
        "a": RowTiers([7, 0], [5, 22, 1, 2, 9]),
        "b": RowTiers([], [11, 3, 0, 6]),
        "d": RowTiers([4, 1, 3]),
    },
    "flex": {"a": RowTiers([], [5, 22, 1]), "d": RowTiers([], [0, 2, 3])},
    "all": {"a": RowTiers(range(40)), "b": RowTiers([], range(23)), "d": RowTiers([1], [2])},
    "few": {"b": RowTiers([], [4])},  # not for every rank of a node
    "empty": {"a": RowTiers(), "d": RowTiers()},
    "moving": {"a": RowTiers([0, 7, 3], [1, 39, 20, 2, 8]), "b": RowTiers([5, 22], [0, 1])},
}
RATES = {"sgd": 0.5, "rowwise_adagrad": 0.05}
EPS = 1e-3  # of the size of the sums, so that both count in the first steps
MAX_LENGTH = 3
_GLOBAL_BATCH = 8
_PLACEMENT = Placement(sequence=tuple(name for names in FEATURES.values() for name in names))
_GROUPS = [["f", "h"], ["g", "k"]]  # m is never deduplicated


class TierModel(nn.Module):
    def __init__(
        self,
        tiers: Tiers | None,
        sparse: Collection[CopyTier] = (),
        retier_every: int | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"embedding_dim": DIM}
        tables = [
            EmbeddingConfig(name=name, num_embeddings=ROWS[name], feature_names=[*of], **sizes)
            for name, of in FEATURES.items()
        ]
        self.sequences: Any = EmbeddingCollection(tables=tables, need_indices=need_indices)
        if tiers is not None:
            self.sequences = TieredEmbeddingCollection(self.sequences, tiers, retier_every, sparse)
        self.attention = _Attention(_PLACEMENT.sequence)
        self.head = _Head(len(_PLACEMENT.sequence))

    def forward(self, batch: ModelInput) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        sequences = self.sequences(batch.sequence_features)
        output = self.head(batch.dense_features, self.attention(sequences, batch))
        loss = ((output - batch.labels) ** 2).mean()
        return loss, (loss.detach(), output.detach())


def model_input(rank: int, step: int, form: Form) -> ModelInput:
    """Return a batch of one rank, the same in both forms; sizes differ from rank to rank.

    In the second step rank 0 has no id, in the third it has cold ones only, in the fourth tiered
    ones only, and in the fifth nobody has one of m.
    """
    random = torch.Generator().manual_seed(1000 * step + rank)
    size = 5 + rank % 3
    source = torch.randint(0, 3, (size,), generator=random)
    values, lengths = [], []
    for table, features in FEATURES.items():
        both = [TIERS[name].get(table, RowTiers()) for name in ("two", "three")]
        tiered = [int(row) for rows in both for row in (*rows.hot, *rows.flex)]
        for feature in features:
            silent = (step == 1 and rank == 0) or (step == 4 and feature == "m")
            sizes = torch.randint(0, 1 if silent else MAX_LENGTH + 1, (3,), generator=random)
            pool = list(range(ROWS[table]))
            if rank == 0 and step == 2:
                pool = sorted(set(pool).difference(tiered))
            elif rank == 0 and step == 3:
                pool = tiered or pool
            drawn = [torch.randint(0, len(pool), (int(n),), generator=random) for n in sizes]
            lists = [torch.tensor(pool)[each] for each in drawn]
            values += [lists[int(row)] for row in source]
            lengths.append(sizes[source])
    keys = list(_PLACEMENT.sequence)
    kjt = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))
    dense = torch.randn(size, 2, generator=random)
    labels = torch.randn(size, generator=random)
    if form == "kjt":
        return lower(Batch(dense, labels, kjt), _PLACEMENT)
    rest = KeyedJaggedTensor(["m"], kjt["m"].values(), lengths=kjt["m"].lengths())
    ikjts = InverseKeyedJaggedTensor.from_kjt(kjt, _GROUPS)
    return lower(Batch(dense, labels, rest, ikjts), _PLACEMENT)


def make_batch(rank: int, world_size: int, step: int, drift: int = 0) -> ModelInput:
    """Return this rank's part of the global batch, the same on any number of ranks.

    The first rows are read most, and ``drift`` rows further on after every sixth step.
    """
    random = torch.Generator().manual_seed(100 + step)
    count = _GLOBAL_BATCH // world_size
    mine = slice(rank * count, (rank + 1) * count)
    values, lengths = [], []
    for table, features in FEATURES.items():
        for _ in features:
            lists = []
            for _ in range(_GLOBAL_BATCH):
                length = int(torch.randint(0, MAX_LENGTH + 1, (1,), generator=random))
                ids = (torch.rand(length, generator=random) ** 3 * ROWS[table]).long()
                lists.append((ids + drift * (step // 6)) % ROWS[table])
            values += lists[mine]
            lengths += [len(each) for each in lists[mine]]
    dense = torch.randn(_GLOBAL_BATCH, 2, generator=random)
    labels = torch.randn(_GLOBAL_BATCH, generator=random)
    keys = list(_PLACEMENT.sequence)
    kjt = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.tensor(lengths))
    return lower(Batch(dense[mine], labels[mine], kjt), _PLACEMENT)


class Job:
    """The model sharded over the ranks that run it, with tiers or, given None, by TorchRec."""

    def __init__(
        self,
        optimizer: Optimizer,
        tiers: Tiers | None,
        *,
        sparse: Collection[CopyTier] | None = None,
        retier_every: int | None = None,
        need_indices: bool = False,
        shardings: Mapping[str, str] | None = None,
        wire: Literal["fp32", "fp16", "bf16", "int8"] = "fp32",
        coalesced: Collection[str] = (),
        sends_all: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device or torch.device("cpu")
        spec = TrainingSpec(optimizer=optimizer, wire=wire, learning_rate=RATES[optimizer], eps=EPS)
        codecs = wire_codecs(spec, None, ())
        if wire == "int8":  # rows of tests are shorter than those that it is offered for
            name = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name
            codecs = {name: QuantizedCommCodecs(Int8(DIM), Int8(DIM))}
        if sparse is None:  # both ways to sum gradients of copies, over the two optimizers
            sparse = COPIES if optimizer == "sgd" else ("flex",)
        model = TierModel(tiers, sparse, retier_every, need_indices)
        sharders: Any = stock_sharders(spec)
        if tiers is not None:
            params = fused_params(spec)
            sharders = [TieredEmbeddingCollectionSharder(params, codecs, coalesced=coalesced)]
        places = dict.fromkeys(FEATURES, "row_wise") | dict(shardings or {})
        with all_gradients_sent() if sends_all else nullcontext():
            self.dmp = shard(model, sharders, places, self.device)
        self.optimizer = build_optimizer(self.dmp, spec)
        check_every_parameter_is_trained(self.dmp, self.optimizer)
        self.pipeline = TrainPipelineSparseDist(
            self.dmp, self.optimizer, self.device, execute_all_batches=True
        )

    @property
    def collection(self) -> Any:
        return self.dmp.module.sequences

    @property
    def tiered(self) -> ShardedTieredEmbeddingCollection:
        assert isinstance(self.collection, ShardedTieredEmbeddingCollection)
        return self.collection

    def train_on(self, batches: list[ModelInput], *, pipelined: bool = False) -> list[Any]:
        if pipelined:
            iterator = iter(batches)
            return [self.pipeline.progress(iterator) for _ in batches]
        found = []
        for batch in batches:
            self.optimizer.zero_grad()
            loss, result = self.dmp(batch.to(self.device))
            loss.backward()
            self.optimizer.step()
            found.append(result)
        return found

    def train(self, steps: range, *, pipelined: bool = False) -> list[Tensor]:
        batches = [make_batch(self.rank, self.world_size, step) for step in steps]
        return [loss for loss, _ in self.train_on(batches, pipelined=pipelined)]

    @torch.no_grad()
    def evaluate(self, step: int, *, pipelined: bool = False) -> Tensor:
        batch = make_batch(self.rank, self.world_size, step)
        self.dmp.eval()
        loss, _ = self.pipeline.progress(iter([batch])) if pipelined else self.dmp(batch)[1]
        self.dmp.train()
        return loss

    def save(self, folder: Path, step: int) -> None:
        Checkpoints(folder, keep=9).save(self.dmp, self.optimizer, Progress(step))

    def load(self, folder: Path) -> int:
        return Checkpoints(folder, keep=9).load(self.dmp, self.optimizer).step

    def weights(self) -> dict[str, Tensor]:
        return whole(self.dmp.state_dict())

    def everything(self) -> dict[str, Tensor]:
        found = {f"model/{name}": value for name, value in self.dmp.state_dict().items()}
        for name, states in self.optimizer.state_dict()["state"].items():
            for key, value in states.items():
                if isinstance(value, Tensor | ShardedTensor):
                    found[f"optimizer/{name}/{key}"] = value
        return whole(found)


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
