"""Modules with embedding tables, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.sharded import bags, configs, sequences
from torch import Tensor, nn
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.testing.device import DEVICE

FEATURES = ["a", "b"]
ROWS, DIM, MAX_LENGTH, IDS = 24, 8, 4, 4000
bag_configs = partial(configs, EmbeddingBagConfig, FEATURES, ROWS, DIM)
table_configs = partial(configs, EmbeddingConfig, FEATURES, ROWS, DIM)
bag_collection = partial(bags, *FEATURES, rows=ROWS, dim=DIM)
collection = partial(sequences, *FEATURES, rows=ROWS, dim=DIM)
weighted_bags = partial(bag_collection, weighted=True)


@dataclass(frozen=True)
class Module:
    """A module of the matrix.

    ``truth`` says whether one process without sharding computes the same. Collision maps do not:
    each rank fills them in its order.
    """

    build: Callable[[], nn.Module]
    width: int = DIM * len(FEATURES)  # of the vector of a row
    weighted: bool = False
    sequences: bool = False  # returns a vector for each id
    truth: bool = True
    sharders: tuple[Callable[[], Any], ...] = ()


class Bags(EmbeddingBagCollection):
    """A user's subclass."""


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = bag_collection(), bag_collection()

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.first(features), self.second(features)


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(tables=table_configs(), need_indices=True)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = self.sequences(features)
        return {name: _scaled(found[name]) for name in FEATURES}


@torch.fx.wrap
def _scaled(found: JaggedTensor) -> JaggedTensor:
    return JaggedTensor(
        found.values() * (1 + found.weights().unsqueeze(1) / ROWS), lengths=found.lengths()
    )


class Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(DIM * len(FEATURES), DIM * len(FEATURES))

    def forward(self, found: KeyedTensor) -> Tensor:
        return self.scale(torch.cat([found[name] for name in FEATURES], dim=1))


def _uneven() -> nn.Module:
    wide, narrow = bag_configs()
    narrow.embedding_dim, narrow.pooling = DIM // 2, PoolingType.MEAN
    return EmbeddingBagCollection(tables=[wide, narrow])


def _fused() -> nn.Module:
    return FusedEmbeddingBagCollection(bag_configs(), torch.optim.SGD, {"lr": 0.1})


def _tower() -> nn.Module:
    return EmbeddingTower(bag_collection(), Interaction())


def processed(by_dict: bool = False) -> nn.Module:
    if by_dict:
        each = {feature: PositionWeightedModule(MAX_LENGTH) for feature in FEATURES}
        return FeatureProcessedEmbeddingBagCollection(weighted_bags(), each)
    lengths = dict.fromkeys(FEATURES, MAX_LENGTH)
    return FeatureProcessedEmbeddingBagCollection(
        weighted_bags(), PositionWeightedModuleCollection(lengths)
    )


def mch(interval: int = 100) -> Any:
    return MCHManagedCollisionModule(
        zch_size=ROWS,
        device=DEVICE,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=interval,
        input_hash_size=IDS,
    )


def managed(make: Callable[[], Any] = mch) -> nn.Module:
    tables = bag_configs()
    maps = ManagedCollisionCollection({config.name: make() for config in tables}, tables)
    return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables), maps)


def _managed_sequences() -> nn.Module:
    tables = table_configs()
    maps = ManagedCollisionCollection({config.name: mch() for config in tables}, tables)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables), maps)


MODULES: dict[str, Module] = {
    "EmbeddingBagCollection": Module(bag_collection),
    "weighted EmbeddingBagCollection": Module(weighted_bags, weighted=True),
    "mean-pooled EmbeddingBagCollection": Module(partial(bag_collection, means=FEATURES)),
    "FP16 EmbeddingBagCollection": Module(
        partial(bag_collection, data_type=DataType.FP16), truth=False
    ),
    "EmbeddingBagCollection of several widths and poolings": Module(_uneven, width=DIM + DIM // 2),
    "EmbeddingBagCollection, init_fn": Module(partial(bag_collection, init_fn=torch.nn.init.ones_)),
    "EmbeddingBagCollection, a table of two features": Module(
        lambda: EmbeddingBagCollection(tables=bag_configs(feature_names=FEATURES)[:1])
    ),
    "a subclass of EmbeddingBagCollection": Module(lambda: Bags(tables=bag_configs())),
    "two modules with tables of equal names": Module(Two, width=4 * DIM),
    "EmbeddingCollection": Module(collection, sequences=True),
    "EmbeddingCollection, need_indices": Module(Indexed),
    "EmbeddingCollection, a table of two features": Module(
        lambda: EmbeddingCollection(tables=table_configs(feature_names=FEATURES)[:1])
    ),
    "FusedEmbeddingBagCollection": Module(_fused, truth=False),
    "FeatureProcessedEmbeddingBagCollection": Module(processed),
    "FeatureProcessedEmbeddingBagCollection with a dict": Module(partial(processed, by_dict=True)),
    "ManagedCollisionEmbeddingBagCollection": Module(managed, truth=False),
    "ManagedCollisionEmbeddingCollection": Module(_managed_sequences, sequences=True, truth=False),
    "EmbeddingTower": Module(_tower),
    "EmbeddingTower, sharded as a whole": Module(_tower, sharders=(EmbeddingTowerSharder,)),
}


def vectors(found: Any, lengths: dict[str, Tensor], stored: ModelInput | None = None) -> Tensor:
    """Return the vectors of all rows, features side by side; sums for sequences.

    Args:
        found: output of a module.
        lengths: ids of each row, by feature.
        stored: maps rows to ids for the output of partial IKJTs.
    """
    if isinstance(found, Awaitable):
        found = found.wait()
    if isinstance(found, tuple):
        each = [part.wait() if isinstance(part, Awaitable) else part for part in found]
        parts = [vectors(part, lengths, stored) for part in each if part is not None]
        return torch.cat(parts, dim=1)
    if isinstance(found, Tensor):
        return found.flatten(1)
    if stored is not None:
        return torch.cat([_gathered(found[name], name, stored) for name in FEATURES], dim=1)
    return torch.cat([_vector(found[name], lengths[name]) for name in FEATURES], dim=1)


def _vector(found: Tensor | JaggedTensor, lengths: Tensor) -> Tensor:
    return found if isinstance(found, Tensor) else _sums(found.values(), lengths)


def _gathered(found: JaggedTensor, feature: str, stored: ModelInput) -> Tensor:
    unique = stored.unique_rows(feature, found)
    return _sums(unique.values(), unique.lengths()).index_select(0, stored.inverse_lookup[feature])


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.arange(lengths.numel(), device=values.device)
    row_of = rows.repeat_interleave(lengths.to(rows).long())
    return values.new_zeros(lengths.numel(), DIM, dtype=torch.float32).index_add(
        0, row_of, values.float()
    )
