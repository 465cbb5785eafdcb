"""Modules with tables that a trainer may have, by the name that the matrix has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.itep_embeddingbag import (
    ITEPEmbeddingBagCollectionSharder,
    ITEPEmbeddingCollectionSharder,
)
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.tensor_pool import TensorPool
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

CPU = torch.device("cpu")
FEATURES = ["a", "b"]
ROWS, DIM, MAX_LENGTH = 24, 8, 4


@dataclass(frozen=True)
class Module:
    """A kind of module.

    Attributes:
        build: makes it, with the weights that the generator gives.
        width: numbers of its vector of a row.
        weighted: whether its batches have to have weights.
        truth: whether one process without sharding computes the same; a collision map that each
            rank fills in its own order does not.
        sharders: of TorchRec's that a trainer with it has besides the defaults.
    """

    build: Callable[[], nn.Module]
    width: int = DIM * len(FEATURES)
    weighted: bool = False
    truth: bool = True
    sharders: tuple[Callable[[], Any], ...] = ()


def bags(**config: Any) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            **{
                "name": f"t_{name}",
                "embedding_dim": DIM,
                "num_embeddings": ROWS,
                "feature_names": [name],
                **config,
            }
        )
        for name in FEATURES
    ]


def tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
        )
        for name in FEATURES
    ]


class Bags(EmbeddingBagCollection):
    """A trainer's subclass."""


class Sequences(EmbeddingCollection):
    """A trainer's subclass."""


class Two(nn.Module):
    """Two modules, fed the same batch."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.first(features), self.second(features)


class Pooled(nn.Module):
    """A pool of rows of ids, which are looked up next to those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=bags())
        self.pool = KeyedJaggedTensorPool(4, {"a": 2}, device=CPU)
        self.pool.update(
            torch.arange(4),
            KeyedJaggedTensor(["a"], torch.arange(8), lengths=torch.full((4,), 2)),
        )
        self.vectors = TensorPool(4, 2, torch.float32, device=CPU)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        self.pool.lookup(torch.arange(4))
        self.vectors.lookup(torch.arange(4))
        found: KeyedTensor = self.bags(features)
        return found


class Interaction(nn.Module):
    """Of a tower."""

    def __init__(self, feature: str | None = None) -> None:
        super().__init__()
        self._features = [feature] if feature else FEATURES
        self.scale = nn.Linear(DIM * len(self._features), DIM * len(self._features))

    def forward(self, found: KeyedTensor) -> Tensor:
        vectors: Tensor = self.scale(torch.cat([found[name] for name in self._features], dim=1))
        return vectors


def _shared_parameter() -> nn.Module:
    two = Two(EmbeddingBagCollection(tables=bags()), EmbeddingBagCollection(tables=bags()))
    weight = two.first.embedding_bags["t_a"].weight  # type: ignore[union-attr, index]
    two.second.embedding_bags["t_a"].weight = weight  # type: ignore[union-attr, index]
    return two


def _twice() -> nn.Module:
    module = EmbeddingBagCollection(tables=bags())
    return Two(module, module)


def _equal_names() -> nn.Module:
    return Two(EmbeddingBagCollection(tables=bags()), EmbeddingBagCollection(tables=bags()))


def _shared_table() -> nn.Module:
    return EmbeddingBagCollection(tables=bags(feature_names=FEATURES)[:1])


def _processed(by_dict: bool = False) -> nn.Module:
    inside = EmbeddingBagCollection(tables=bags(), is_weighted=True)
    if by_dict:
        each = {feature: PositionWeightedModule(MAX_LENGTH) for feature in FEATURES}
        return FeatureProcessedEmbeddingBagCollection(inside, each)
    collection = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, MAX_LENGTH))
    return FeatureProcessedEmbeddingBagCollection(inside, collection)


def _maps(configs: Any) -> ManagedCollisionCollection:
    return ManagedCollisionCollection(
        {
            config.name: MCHManagedCollisionModule(
                zch_size=ROWS,
                device=CPU,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=100,
                input_hash_size=4000,
            )
            for config in configs
        },
        configs,
    )


def _managed_bags() -> nn.Module:
    inside = EmbeddingBagCollection(tables=bags())
    return ManagedCollisionEmbeddingBagCollection(inside, _maps(inside.embedding_bag_configs()))


def _managed_sequences() -> nn.Module:
    inside = EmbeddingCollection(tables=tables())
    return ManagedCollisionEmbeddingCollection(inside, _maps(inside.embedding_configs()))


def _itep(pooled: bool) -> nn.Module:
    pruning = GenericITEPModule(dict.fromkeys(["t_a", "t_b"], 2 * ROWS), enable_pruning=False)
    if pooled:
        return ITEPEmbeddingBagCollection(EmbeddingBagCollection(tables=bags()), pruning)
    return ITEPEmbeddingCollection(EmbeddingCollection(tables=tables()), pruning)


def _pec() -> nn.Module:
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

    return PECEmbeddingCollection(EmbeddingCollection(tables=tables()))


def _pec_sharder() -> Any:
    from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder

    return PECEmbeddingCollectionSharder()


def _towers() -> nn.Module:
    configs = bags()
    return EmbeddingTowerCollection(
        [
            EmbeddingTower(EmbeddingBagCollection(tables=[config]), Interaction(feature))
            for config, feature in zip(configs, FEATURES, strict=True)
        ]
    )


_SGD: dict[str, Any] = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}

MODULES: dict[str, Module] = {
    "EmbeddingBagCollection": Module(lambda: EmbeddingBagCollection(tables=bags())),
    "weighted EmbeddingBagCollection": Module(
        lambda: EmbeddingBagCollection(tables=bags(), is_weighted=True), weighted=True
    ),
    "mean-pooled EmbeddingBagCollection": Module(
        lambda: EmbeddingBagCollection(tables=bags(pooling=PoolingType.MEAN))
    ),
    "FP16 EmbeddingBagCollection": Module(
        lambda: EmbeddingBagCollection(tables=bags(data_type=DataType.FP16)), truth=False
    ),
    "EmbeddingCollection": Module(lambda: EmbeddingCollection(tables=tables())),
    "FusedEmbeddingBagCollection": Module(
        lambda: FusedEmbeddingBagCollection(tables=bags(), **_SGD), truth=False
    ),
    "FusedEmbeddingCollection": Module(
        lambda: FusedEmbeddingCollection(tables=tables(), **_SGD),
        truth=False,
        sharders=(FusedEmbeddingCollectionSharder,),
    ),
    "FeatureProcessedEmbeddingBagCollection": Module(_processed),
    "the same with a dict": Module(lambda: _processed(by_dict=True)),
    "ManagedCollisionEmbeddingBagCollection": Module(_managed_bags, truth=False),
    "ManagedCollisionEmbeddingCollection": Module(_managed_sequences, truth=False),
    "ITEPEmbeddingBagCollection": Module(
        lambda: _itep(True), truth=False, sharders=(ITEPEmbeddingBagCollectionSharder,)
    ),
    "ITEPEmbeddingCollection": Module(
        lambda: _itep(False), truth=False, sharders=(ITEPEmbeddingCollectionSharder,)
    ),
    "PECEmbeddingCollection": Module(_pec, sharders=(_pec_sharder,)),
    "EmbeddingTower": Module(
        lambda: EmbeddingTower(EmbeddingBagCollection(tables=bags()), Interaction())
    ),
    "EmbeddingTower, sharded as a whole": Module(
        lambda: EmbeddingTower(EmbeddingBagCollection(tables=bags()), Interaction()),
        sharders=(EmbeddingTowerSharder,),
    ),
    "EmbeddingTowerCollection": Module(_towers),
    "EmbeddingTowerCollection, sharded as a whole": Module(
        _towers, sharders=(EmbeddingTowerCollectionSharder,)
    ),
    "KeyedJaggedTensorPool and TensorPool": Module(Pooled),
    "a subclass of EmbeddingBagCollection": Module(lambda: Bags(tables=bags())),
    "a subclass of EmbeddingCollection": Module(lambda: Sequences(tables=tables())),
    "two modules with tables of equal names": Module(_equal_names, width=4 * DIM),
    "one module at two places": Module(_twice, width=4 * DIM),
    "a parameter of two modules": Module(_shared_parameter, width=4 * DIM),
    "a table of two features": Module(_shared_table),
}

#: Module types that a sharder of the library is for, and no cell trains, with why.
NOT_TRAINED = {
    "EmbeddingBag": "a part of an EmbeddingBagCollection; nn.EmbeddingBag has no features",
    "ManagedCollisionCollection": "a part of the managed collision modules",
    "QuantEmbeddingBagCollection": "quantised, for inference",
    "QuantEmbeddingCollection": "quantised, for inference",
    "QuantFeatureProcessedEmbeddingBagCollection": "quantised, for inference",
    "QuantManagedCollisionEmbeddingBagCollection": "quantised, for inference",
    "QuantManagedCollisionEmbeddingCollection": "quantised, for inference",
}


def vectors(found: Any, num_rows: int, lengths: dict[str, Tensor]) -> Tensor:
    """The vectors of all rows, features next to each other; of sequences, the sums of a row."""
    if isinstance(found, Awaitable):
        found = found.wait()
    if isinstance(found, tuple):
        each = [part.wait() if isinstance(part, Awaitable) else part for part in found]
        parts = [vectors(part, num_rows, lengths) for part in each if part is not None]
        return torch.cat(parts, dim=1)
    if isinstance(found, Tensor):
        return found
    return torch.cat([_vector(found[name], lengths[name], num_rows) for name in FEATURES], dim=1)


def _vector(found: Tensor | JaggedTensor, lengths: Tensor, num_rows: int) -> Tensor:
    if isinstance(found, Tensor):
        return found
    row_of = torch.arange(num_rows).repeat_interleave(lengths.long())
    return torch.zeros(num_rows, DIM).index_add(0, row_of, found.values().float())
