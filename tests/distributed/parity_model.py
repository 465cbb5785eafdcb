"""The model, the data and the plain reference of the parity tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from tests.sharded import configs
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.interfaces import Pooling, TargetPooling
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.model.sequence_pooling import PoolRows, SequencePooling
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

DIM = 8
NUM_STEPS = 4
Form = Literal["plain", "unique", "partial"]
# More ids than any rank count divides, and fewer than the ids of a batch.
_ROWS = {"b0": 13, "b1": 5, "b2": 30, "r0": 7, "s0": 13, "s1": 6, "s2": 21, "s3": 9}
_MAX_LENGTH = 3
_POOLED = ("p0", "p1", "p2", "p3")
_REPLICATED = ("r0",)
_SEQUENCE = ("s0", "s1", "s2", "s3")
# p3 and s3 are never deduplicated; p2 shares a table with p3.
_GROUPS = [["p0", "p1"], ["p2"], ["r0"], ["s0", "s1"], ["s2"]]
# Features whose rows may move on and then share ids; one of each way of pooling, and two sequences.
_MOVING = [["s0", "p0"], ["s1", "r0"]]
_TABLE = {"p0": "b0", "p1": "b1", "p2": "b2", "p3": "b2"}


def table_of(feature: str) -> str:
    return _TABLE.get(feature, feature)


@dataclass(frozen=True)
class Parts:
    pooled: bool
    replicated: bool
    sequence: bool
    # A plugin in place of this file's own pooling of sequences.
    pooling: Pooling | None = None
    pool_rows: PoolRows = "unique"

    @property
    def placement(self) -> Placement:
        return Placement(
            pooled=_POOLED if self.pooled else (),
            # Where no other module takes the pooled features, the replicated one takes all.
            replicated=(
                () if not self.replicated else _REPLICATED if self.pooled else _POOLED + _REPLICATED
            ),
            sequence=_SEQUENCE if self.sequence else (),
        )


class ParityModel(nn.Module):
    """EBC over VBE, replicated EBC over all rows, EC over unique rows, and a head."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.placement = placement = parts.placement
        self.bags = _bags(placement.pooled)
        self.replicated_bags = _bags(placement.replicated)
        self.sequences = _sequences(placement.sequence)
        self.attention = _pooling(parts) if placement.sequence else None
        num_features = len(placement.pooled + placement.replicated + placement.sequence)
        self.head = _Head(num_features)

    def forward(self, batch: ModelInput) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        vectors = []
        bags = {}
        if self.bags is not None:
            # By name: a sharded module orders its columns by sharding.
            bags = self.bags(batch.sparse_features)
            vectors += [bags[name] for name in self.placement.pooled]
        if self.replicated_bags is not None:
            copies = self.replicated_bags(batch.replicated_features)
            vectors += [copies[name] for name in self.placement.replicated]
        if self.sequences is not None and self.attention is not None:
            sequences = self.sequences(batch.sequence_features)
            if isinstance(self.attention, SequencePooling):
                targets = {name: bags[name] for name in self.attention.targets}
                vectors.append(self.attention(sequences, batch, targets).flatten(1))
            else:
                vectors.append(self.attention(sequences, batch))
        output = self.head(batch.dense_features, torch.cat(vectors, dim=1))
        loss = ((output - batch.labels) ** 2).mean()
        return loss, (loss.detach(), output.detach())


def _pooling(parts: Parts) -> nn.Module:
    features = parts.placement.sequence
    if parts.pooling is None:
        return _Attention(features)
    pooling = SequencePooling(features, DIM, parts.pool_rows)
    for feature in features:
        pooling.put(feature, parts.pooling)
    if isinstance(parts.pooling, TargetPooling):
        for parameter in pooling.parameters():
            # Large, so that scores differ and their projections learn something in a few steps.
            nn.init.normal_(parameter, std=0.5)
    return pooling


class _Attention(nn.Module):
    def __init__(self, features: Iterable[str]) -> None:
        super().__init__()
        self.features = tuple(features)
        self.query = nn.ParameterDict({f"of_{name}": torch.randn(DIM) for name in features})

    def forward(self, sequences: dict[str, JaggedTensor], batch: ModelInput) -> Tensor:
        return torch.cat(
            [self._pool(name, sequences[name], batch) for name in self.features], dim=1
        )

    def _pool(self, name: str, jagged: JaggedTensor, batch: ModelInput) -> Tensor:
        unique = batch.unique_rows(name, jagged)
        rows = unique.to_padded_dense(_MAX_LENGTH)
        mask = torch.arange(_MAX_LENGTH, device=rows.device) < unique.lengths().unsqueeze(1)
        weights = torch.sigmoid(rows @ self.query[f"of_{name}"]) * mask
        pooled = (weights.unsqueeze(2) * rows).sum(1)
        inverse = batch.inverse_lookup.get(name)
        return pooled if inverse is None else pooled.index_select(0, inverse)


class _Head(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 + num_features * DIM, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.layers(torch.cat([dense, vectors], dim=1)).squeeze(1)


def _bags(features: tuple[str, ...]) -> EmbeddingBagCollection | None:
    tables: dict[str, EmbeddingBagConfig] = {}
    for feature in features:
        name = table_of(feature)
        fields = {"name": name, "feature_names": []}
        (table,) = configs(EmbeddingBagConfig, [name], _ROWS[name], DIM, **fields)
        tables.setdefault(name, table).feature_names.append(feature)
    if "b1" in tables:
        tables["b1"].pooling = PoolingType.MEAN
    return EmbeddingBagCollection(tables=[*tables.values()]) if features else None


def _sequences(features: tuple[str, ...]) -> EmbeddingCollection | None:
    tables = [configs(EmbeddingConfig, [name], _ROWS[name], DIM, name=name)[0] for name in features]
    return EmbeddingCollection(tables=tables) if features else None


def make_batch(rank: int, step: int, *, form: Form, moving: bool = False) -> Batch:
    """Rows of one rank; whatever the form, they are the same rows.

    With ``moving``, the lists of some features are segments of one list, in the order of rows.

    Batches differ in size from rank to rank. Lists may be empty. In the first step rank 0 has one
    row over and over; in the third nobody has duplicates; in the fourth p1 and s1 have no ids on
    rank 0, and s2 has none on any rank.
    """
    random = torch.Generator().manual_seed(1000 * step + rank)
    batch_size = 6 + rank
    num_sources = {0: 1 if rank == 0 else 3, 2: batch_size}.get(step, 3)
    source = torch.randint(0, num_sources, (batch_size,), generator=random)
    if moving:
        source = source.sort().values
    if step == 2:
        source = torch.arange(batch_size)
    values, lengths = [], []
    features = _POOLED + _REPLICATED + _SEQUENCE
    for feature in features:
        silent = step == 3 and (feature == "s2" or (rank == 0 and feature in ("p1", "s1")))
        # Groups have duplicates of their own: fewer rows share p2's than p0's.
        finer = torch.maximum(source, torch.arange(batch_size) % 2)
        rows = finer if feature in ("p2", "s2") else source
        longest = 0 if silent else _MAX_LENGTH
        sizes = torch.randint(0, longest + 1, (int(rows.max()) + 1,), generator=random)
        if step == 2:
            sizes = torch.full_like(sizes, 2)
        lists = [
            torch.randint(0, _ROWS[table_of(feature)], (int(size),), generator=random)
            for size in sizes
        ]
        if moving and feature in _MOVING[0] + _MOVING[1]:
            ids = torch.arange(len(lists) + longest) * 2 % _ROWS[table_of(feature)]
            lists = [ids[index : index + int(size)] for index, size in enumerate(sizes)]
        elif step == 2:
            # Distinct rows: their first ids count up, where the table is large enough.
            for index, ids in enumerate(lists):
                ids[0] = index % _ROWS[table_of(feature)]
                ids[1] = index // _ROWS[table_of(feature)]
        values += [lists[int(row)] for row in rows]
        lengths.append(sizes[rows])
    kjt = KeyedJaggedTensor(
        keys=list(features), values=torch.cat(values), lengths=torch.cat(lengths)
    )
    dense = torch.randn(batch_size, 2, generator=random)
    labels = torch.randn(batch_size, generator=random)
    if form == "plain":
        return Batch(dense, labels, kjt)
    partials = _MOVING if form == "partial" else []
    moved = {feature for group in partials for feature in group}
    groups = [kept for group in _GROUPS if (kept := [name for name in group if name not in moved])]
    shared = moved | {feature for group in groups for feature in group}
    return Batch(
        dense,
        labels,
        kjt.permute([kjt.keys().index(each) for each in features if each not in shared]),
        InverseKeyedJaggedTensor.from_kjt(kjt, groups),
        tuple(PartialInverseKeyedJaggedTensor.from_kjt(kjt, group) for group in partials),
    )


class ReferenceOptimizer:
    """Textbook SGD, or Adagrad that is row-wise on tables, on whole tensors.

    ``column_shards`` gives tables that are cut into that many column shards: each shard has a
    row-wise Adagrad of its own, in TorchRec's sharding as here. ``entries`` gives optimizer, rate
    and eps of tables that have their own.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: set[str],
        optimizer: str,
        learning_rate: float,
        eps: float,
        column_shards: dict[str, int],
        entries: Mapping[str, tuple[str, float, float]] = MappingProxyType({}),
    ) -> None:
        self._parameters = list(model.named_parameters())
        self._tables = tables
        self._default = f"torchrec.{optimizer}", learning_rate, eps
        self._entries = entries
        self._column_shards = column_shards
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for name, parameter in self._parameters:
            gradient = parameter.grad
            assert gradient is not None, name
            table = name.removesuffix(".weight").rpartition(".")[2]
            optimizer, rate, eps = self._entries.get(table, self._default)
            if optimizer != "torchrec.sgd":
                rows = optimizer == "torchrec.rowwise_adagrad" and table in self._tables
                squares = self._squares(table, gradient) if rows else gradient**2
                total = self._sums.setdefault(name, torch.zeros_like(squares))
                total += squares
                gradient = gradient / (total.sqrt() + eps)
            parameter.sub_(rate * gradient)
            parameter.grad = None

    def _squares(self, table: str, gradient: Tensor) -> Tensor:
        shards = self._column_shards.get(table, 1)
        blocks = (gradient**2).view(len(gradient), shards, -1)
        return blocks.mean(2, keepdim=True).expand_as(blocks).reshape(gradient.shape)
