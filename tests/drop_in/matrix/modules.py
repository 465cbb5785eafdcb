"""Modules with tables that a trainer may have, by the name that the matrix has for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.drop_in.matrix.managed import (
    POLICIES,
    ManagedBags,
    ManagedSequences,
    adapted,
    hashed_bags,
    hashed_sequences,
    itep,
    managed_bags,
    managed_sequences,
    pec,
    pec_sharder,
    with_policy,
)
from tests.drop_in.matrix.tables import (
    DIM,
    FEATURES,
    FIELDS,
    MAX_LENGTH,
    ROWS,
    bag_collection,
    bags,
    collection,
    tables,
)
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
from torchrec.models import deepfm, dlrm
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor import PositionWeightedProcessor
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.tensor_pool import TensorPool
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.testing.device import DEVICE


@dataclass(frozen=True)
class Module:
    """A kind of module.

    Attributes:
        build: makes it, with the weights that the generator gives.
        width: numbers of its vector of a row.
        weighted: whether its batches have to have weights.
        sequences: whether it has a vector for each id.
        truth: whether one process without sharding computes the same; a collision map that each
            rank fills in its own order does not.
        sharders: of TorchRec's that a trainer with it has besides the defaults.
    """

    build: Callable[[], nn.Module]
    width: int = DIM * len(FEATURES)
    weighted: bool = False
    sequences: bool = False
    truth: bool = True
    sharders: tuple[Callable[[], Any], ...] = ()


class Bags(EmbeddingBagCollection):
    """A trainer's subclass."""


class Sequences(EmbeddingCollection):
    """A trainer's subclass."""


class Processed(FeatureProcessedEmbeddingBagCollection):
    """A trainer's subclass."""


class ProcessedBefore(nn.Module):
    """Weights by position, which the model itself makes before the lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = PositionWeightedProcessor(dict.fromkeys(FEATURES, MAX_LENGTH))
        self.bags = EmbeddingBagCollection(tables=bags(), is_weighted=True)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        found: KeyedTensor = self.bags(self.processor(features))
        return found


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
        self.bags = bag_collection()
        self.pool = KeyedJaggedTensorPool(4, {"a": 2}, device=DEVICE)
        self.pool.update(
            torch.arange(4, device=DEVICE),
            KeyedJaggedTensor(["a"], torch.arange(8), lengths=torch.full((4,), 2)).to(DEVICE),
        )
        self.vectors = TensorPool(4, 2, torch.float32, device=DEVICE)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        self.pool.lookup(torch.arange(4, device=DEVICE))
        self.vectors.lookup(torch.arange(4, device=DEVICE))
        found: KeyedTensor = self.bags(features)
        return found


class Indexed(nn.Module):
    """An EmbeddingCollection that returns ids next to vectors, and a model that uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(tables=tables(), need_indices=True)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = self.sequences(features)
        return {name: _scaled(found[name]) for name in FEATURES}


@torch.fx.wrap
def _scaled(found: JaggedTensor) -> JaggedTensor:
    return JaggedTensor(
        found.values() * (1 + found.weights().unsqueeze(1) / ROWS), lengths=found.lengths()
    )


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
    two = Two(bag_collection(), bag_collection())
    weight = two.first.embedding_bags["t_a"].weight  # type: ignore[union-attr, index]
    two.second.embedding_bags["t_a"].weight = weight  # type: ignore[union-attr, index]
    return two


def _twice() -> nn.Module:
    module = bag_collection()
    return Two(module, module)


def _equal_names() -> nn.Module:
    return Two(bag_collection(), bag_collection())


def _sequences_of_equal_names() -> nn.Module:
    return Two(collection(), collection())


def _shared_table() -> nn.Module:
    return EmbeddingBagCollection(tables=bags(feature_names=FEATURES)[:1])


def _shared_table_of_sequences() -> nn.Module:
    return EmbeddingCollection(tables=tables(feature_names=FEATURES)[:1])


def _uneven() -> nn.Module:
    wide, narrow = bags()[0], bags(embedding_dim=DIM // 2, pooling=PoolingType.MEAN)[1]
    return EmbeddingBagCollection(tables=[wide, narrow])


def _debugged(pooled: bool) -> nn.Module:
    from torchrec.modules.debug_embedding_modules import (
        DebugEmbeddingBagCollection,
        DebugEmbeddingCollection,
    )

    if pooled:
        return DebugEmbeddingBagCollection(bags(), DEVICE, debug_mode=True)
    return DebugEmbeddingCollection(tables(), DEVICE, debug_mode=True)


def _processed(
    by_dict: bool = False,
    kind: type[FeatureProcessedEmbeddingBagCollection] = FeatureProcessedEmbeddingBagCollection,
) -> nn.Module:
    inside = EmbeddingBagCollection(tables=bags(), is_weighted=True)
    if by_dict:
        each = {feature: PositionWeightedModule(MAX_LENGTH) for feature in FEATURES}
        return kind(inside, each)
    collection = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, MAX_LENGTH))
    return kind(inside, collection)


def _towers() -> nn.Module:
    configs = bags()
    return EmbeddingTowerCollection(
        [
            EmbeddingTower(EmbeddingBagCollection(tables=[config]), Interaction(feature))
            for config, feature in zip(configs, FEATURES, strict=True)
        ]
    )


_COLLECTIONS: dict[str, Callable[..., nn.Module]] = {
    "EmbeddingBagCollection": bag_collection,
    "EmbeddingCollection": collection,
}
_GATHER_SELECT: dict[str, Any] = {
    "use_gather_select": True,
    "use_gather_select_per_sharding": {"table_wise": True, "row_wise": True},  # not in 1.6
}
_SGD: dict[str, Any] = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}

MODULES: dict[str, Module] = {
    "EmbeddingBagCollection": Module(bag_collection),
    "weighted EmbeddingBagCollection": Module(
        lambda: EmbeddingBagCollection(tables=bags(), is_weighted=True), weighted=True
    ),
    "mean-pooled EmbeddingBagCollection": Module(partial(bag_collection, pooling=PoolingType.MEAN)),
    "FP16 EmbeddingBagCollection": Module(
        partial(bag_collection, data_type=DataType.FP16), truth=False
    ),
    "EmbeddingBagCollection of several widths and poolings": Module(_uneven, width=DIM + DIM // 2),
    "EmbeddingCollection": Module(collection, sequences=True),
    "FP16 EmbeddingCollection": Module(partial(collection, data_type=DataType.FP16), truth=False),
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
    "ManagedCollisionEmbeddingBagCollection": Module(managed_bags, truth=False),
    "ManagedCollisionEmbeddingCollection": Module(managed_sequences, sequences=True, truth=False),
    **{
        f"ManagedCollisionEmbeddingBagCollection, {name}": Module(with_policy(policy), truth=False)
        for name, policy in POLICIES.items()
    },
    "ManagedCollisionEmbeddingBagCollection, hash": Module(hashed_bags, truth=False),
    "ManagedCollisionEmbeddingCollection, hash": Module(hashed_sequences, truth=False),
    "McEmbeddingBagCollectionAdapter": Module(lambda: adapted(True), truth=False),
    "McEmbeddingCollectionAdapter": Module(lambda: adapted(False), truth=False),
    "ITEPEmbeddingBagCollection": Module(
        lambda: itep(True), truth=False, sharders=(ITEPEmbeddingBagCollectionSharder,)
    ),
    "ITEPEmbeddingCollection": Module(
        lambda: itep(False), truth=False, sharders=(ITEPEmbeddingCollectionSharder,)
    ),
    "PECEmbeddingCollection": Module(pec, sharders=(pec_sharder,)),
    "EmbeddingTower": Module(lambda: EmbeddingTower(bag_collection(), Interaction())),
    "EmbeddingTower, sharded as a whole": Module(
        lambda: EmbeddingTower(bag_collection(), Interaction()),
        sharders=(EmbeddingTowerSharder,),
    ),
    "EmbeddingTowerCollection": Module(_towers),
    "EmbeddingTowerCollection, sharded as a whole": Module(
        _towers, sharders=(EmbeddingTowerCollectionSharder,)
    ),
    "KeyedJaggedTensorPool and TensorPool": Module(Pooled),
    "DebugEmbeddingBagCollection": Module(lambda: _debugged(True)),
    "DebugEmbeddingCollection": Module(lambda: _debugged(False)),
    "SparseArch of DLRM": Module(lambda: dlrm.SparseArch(bag_collection())),
    "SparseArch of DeepFM": Module(lambda: deepfm.SparseArch(bag_collection())),
    "PositionWeightedProcessor before an EmbeddingBagCollection": Module(ProcessedBefore),
    "a subclass of EmbeddingBagCollection": Module(lambda: Bags(tables=bags())),
    "a subclass of EmbeddingCollection": Module(lambda: Sequences(tables=tables())),
    "a subclass of FeatureProcessedEmbeddingBagCollection": Module(
        lambda: _processed(kind=Processed)
    ),
    "a subclass of ManagedCollisionEmbeddingBagCollection": Module(
        lambda: managed_bags(kind=ManagedBags), truth=False
    ),
    "a subclass of ManagedCollisionEmbeddingCollection": Module(
        lambda: managed_sequences(kind=ManagedSequences), truth=False
    ),
    "two modules with tables of equal names": Module(_equal_names, width=4 * DIM),
    "two EmbeddingCollections with tables of equal names": Module(
        _sequences_of_equal_names, width=4 * DIM
    ),
    "one module at two places": Module(_twice, width=4 * DIM),
    "a parameter of two modules": Module(_shared_parameter, width=4 * DIM),
    "a table of two features": Module(_shared_table),
    "a table of two features of an EmbeddingCollection": Module(_shared_table_of_sequences),
    "EmbeddingCollection, need_indices": Module(Indexed),
    **{
        f"EmbeddingCollection, {argument}": Module(
            partial(EmbeddingCollection, tables(), **{argument: value})
        )
        for argument, value in _GATHER_SELECT.items()
        if argument in inspect.signature(EmbeddingCollection).parameters
    },
    **{
        f"{kind.name} EmbeddingBagCollection": Module(
            partial(bag_collection, data_type=kind), truth=False
        )
        for kind in DataType
        if kind not in (DataType.FP32, DataType.FP16)
    },
    **{
        f"{kind}, {field}": Module(partial(build, **{field: value}))
        for kind, build in _COLLECTIONS.items()
        for field, value in FIELDS.items()
    },
}

#: Module types of TorchRec that have a sharder or take a KeyedJaggedTensor and that no cell trains,
#: with why.
NOT_TRAINED = {
    "DLRM": "its tables are those of its SparseArch",
    "DLRM_DCN": "its tables are those of its SparseArch",
    "DLRM_Projection": "its tables are those of its SparseArch",
    "SimpleDeepFMNN": "its tables are those of its SparseArch",
    "EmbeddingBag": "a part of an EmbeddingBagCollection; nn.EmbeddingBag has no features",
    "ManagedCollisionCollection": "a part of the managed collision modules",
    "FeatureProcessorDictWrapper": "what FeatureProcessedEmbeddingBagCollection makes of a dict",
    "GenericITEPModule": "a part of the ITEP modules",
    "RowwiseShardedITEPModule": "a part of the ITEP modules",
    "PooledEmbeddingArch": "in no public version; TorchRec 1.9 names its sharder in a comment",
    "QuantEmbeddingBagCollection": "quantised, for inference",
    "QuantEmbeddingCollection": "quantised, for inference",
    "QuantFeatureProcessedEmbeddingBagCollection": "quantised, for inference",
    "QuantManagedCollisionEmbeddingBagCollection": "quantised, for inference",
    "QuantManagedCollisionEmbeddingCollection": "quantised, for inference",
}
