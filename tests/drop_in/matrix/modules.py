"""Modules with tables that a trainer may have, by the name that the matrix has for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.sharded import bags, configs, sequences
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
from torchrec.models import deepfm, dlrm
from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
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
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.tensor_pool import TensorPool
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.testing.device import DEVICE

FEATURES = ["a", "b"]
ROWS, DIM, MAX_LENGTH, IDS = 24, 8, 4, 4000
#: Values other than the default, of fields of a table's config but for its name, sizes, features,
#: pooling and data type.
FIELDS: dict[str, Any] = {
    "weight_init_max": 2.0,
    "weight_init_min": -2.0,
    "num_embeddings_post_pruning": ROWS // 2,
    "init_fn": torch.nn.init.ones_,
    "need_pos": True,
    "input_dim": 2 * ROWS,
    "total_num_buckets": 4,
    "use_virtual_table": True,
    "virtual_table_eviction_policy": CountBasedEvictionPolicy(eviction_threshold=1),
    "enable_embedding_update": True,
    "stash_weights": True,
}
bag_configs = partial(configs, EmbeddingBagConfig, FEATURES, ROWS, DIM)
table_configs = partial(configs, EmbeddingConfig, FEATURES, ROWS, DIM)
bag_collection = partial(bags, *FEATURES, rows=ROWS, dim=DIM)
collection = partial(sequences, *FEATURES, rows=ROWS, dim=DIM)
weighted_bags = partial(bag_collection, weighted=True)


@dataclass(frozen=True)
class Module:
    build: Callable[[], nn.Module]
    width: int = DIM * len(FEATURES)  # of the vector of a row
    weighted: bool = False
    sequences: bool = False  # it has a vector for each id
    # One process without sharding computes the same; each rank fills collision maps in its order.
    truth: bool = True
    sharders: tuple[Callable[[], Any], ...] = ()


class Bags(EmbeddingBagCollection):
    """A trainer's subclass."""


class Sequences(EmbeddingCollection):
    """A trainer's subclass."""


class Processed(FeatureProcessedEmbeddingBagCollection):
    """A trainer's subclass."""


class ManagedBags(ManagedCollisionEmbeddingBagCollection):
    """A trainer's subclass."""


class ManagedSequences(ManagedCollisionEmbeddingCollection):
    """A trainer's subclass."""


class ProcessedBefore(nn.Module):
    """A model that makes weights by position before the lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = PositionWeightedProcessor(dict.fromkeys(FEATURES, MAX_LENGTH))
        self.bags = weighted_bags()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        found: KeyedTensor = self.bags(self.processor(features))
        return found


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.first(features), self.second(features)


class Pooled(nn.Module):
    """A model that looks up pools beside its batch."""

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
    """A model that uses ids and vectors of an EmbeddingCollection."""

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
    def __init__(self, feature: str | None = None) -> None:
        super().__init__()
        self._features = [feature] if feature else FEATURES
        self.scale = nn.Linear(DIM * len(self._features), DIM * len(self._features))

    def forward(self, found: KeyedTensor) -> Tensor:
        vectors: Tensor = self.scale(torch.cat([found[name] for name in self._features], dim=1))
        return vectors


def _shared_parameter() -> nn.Module:
    one, other = bag_collection(), bag_collection()
    other.embedding_bags["t_a"].weight = one.embedding_bags["t_a"].weight
    return Two(one, other)


def _twice() -> nn.Module:
    module = bag_collection()
    return Two(module, module)


def _uneven() -> nn.Module:
    wide, narrow = bag_configs()
    narrow.embedding_dim, narrow.pooling = DIM // 2, PoolingType.MEAN
    return EmbeddingBagCollection(tables=[wide, narrow])


def _debugged(kind: str, tables: Any) -> nn.Module:
    from torchrec.modules import debug_embedding_modules

    made: nn.Module = getattr(debug_embedding_modules, kind)(tables, DEVICE, debug_mode=True)
    return made


def processed(
    by_dict: bool = False,
    kind: type[FeatureProcessedEmbeddingBagCollection] = FeatureProcessedEmbeddingBagCollection,
) -> nn.Module:
    if by_dict:
        each = {feature: PositionWeightedModule(MAX_LENGTH) for feature in FEATURES}
        return kind(weighted_bags(), each)
    lengths = dict.fromkeys(FEATURES, MAX_LENGTH)
    return kind(weighted_bags(), PositionWeightedModuleCollection(lengths))


def _towers() -> nn.Module:
    return EmbeddingTowerCollection(
        [
            EmbeddingTower(EmbeddingBagCollection(tables=[config]), Interaction(feature))
            for config, feature in zip(bag_configs(), FEATURES, strict=True)
        ]
    )


def mch(policy: type = DistanceLFU_EvictionPolicy, interval: int = 100) -> Any:
    return MCHManagedCollisionModule(
        zch_size=ROWS,
        device=DEVICE,
        eviction_policy=policy(),
        eviction_interval=interval,
        input_hash_size=IDS,
    )


def _hash() -> Any:
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    return HashZchManagedCollisionModule(
        zch_size=ROWS, device=DEVICE, total_num_buckets=2, max_probe=4, input_hash_size=IDS
    )


def managed(
    make: Callable[[], Any] = mch,
    kind: Any = ManagedCollisionEmbeddingBagCollection,
) -> nn.Module:
    if issubclass(kind, ManagedCollisionEmbeddingBagCollection):
        inside: Any = bag_collection()
        tables = inside.embedding_bag_configs()
    else:
        inside = collection()
        tables = inside.embedding_configs()
    maps = ManagedCollisionCollection({config.name: make() for config in tables}, tables)
    made: nn.Module = kind(inside, maps)
    return made


managed_sequences = partial(managed, kind=ManagedCollisionEmbeddingCollection)


def _adapted(kind: str, inside: str, tables: Any) -> nn.Module:
    """Make an adapter of TorchRec's with tables on DEVICE instead of meta."""
    from torchrec.modules import mc_adapter

    how: dict[str, Any] = {"device": DEVICE, "world_size": 2, "zch_method": "sort_zch"}
    how |= {"input_hash_size": IDS, "eviction_interval": 100}
    made: nn.Module = getattr(mc_adapter, kind)(tables, **how)
    embeddings: Any = getattr(made, inside)
    for table in embeddings._embedding_module.to_empty(device=DEVICE).parameters():
        nn.init.uniform_(table, -0.2, 0.2)
    return made


def _itep(kind: Any, inside: nn.Module) -> nn.Module:
    pruning = GenericITEPModule(dict.fromkeys(["t_a", "t_b"], 2 * ROWS), enable_pruning=False)
    made: nn.Module = kind(inside, pruning)
    return made


def _pec() -> nn.Module:
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

    return PECEmbeddingCollection(collection())


def _pec_sharder() -> Any:
    from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder

    return PECEmbeddingCollectionSharder()


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
    "weighted EmbeddingBagCollection": Module(weighted_bags, weighted=True),
    "mean-pooled EmbeddingBagCollection": Module(partial(bag_collection, means=FEATURES)),
    "FP16 EmbeddingBagCollection": Module(
        partial(bag_collection, data_type=DataType.FP16), truth=False
    ),
    "EmbeddingBagCollection of several widths and poolings": Module(_uneven, width=DIM + DIM // 2),
    "EmbeddingCollection": Module(collection, sequences=True),
    "FP16 EmbeddingCollection": Module(partial(collection, data_type=DataType.FP16), truth=False),
    "FusedEmbeddingBagCollection": Module(
        lambda: FusedEmbeddingBagCollection(tables=bag_configs(), **_SGD), truth=False
    ),
    "FusedEmbeddingCollection": Module(
        lambda: FusedEmbeddingCollection(tables=table_configs(), **_SGD),
        truth=False,
        sharders=(FusedEmbeddingCollectionSharder,),
    ),
    "FeatureProcessedEmbeddingBagCollection": Module(processed),
    "the same with a dict": Module(partial(processed, by_dict=True)),
    "ManagedCollisionEmbeddingBagCollection": Module(managed, truth=False),
    "ManagedCollisionEmbeddingCollection": Module(managed_sequences, sequences=True, truth=False),
    **{
        f"ManagedCollisionEmbeddingBagCollection, {name}": Module(
            partial(managed, partial(mch, policy)), truth=False
        )
        for name, policy in {"LFU": LFU_EvictionPolicy, "LRU": LRU_EvictionPolicy}.items()
    },
    "ManagedCollisionEmbeddingBagCollection, hash": Module(partial(managed, _hash), truth=False),
    "ManagedCollisionEmbeddingCollection, hash": Module(
        partial(managed_sequences, _hash), truth=False
    ),
    "McEmbeddingBagCollectionAdapter": Module(
        lambda: _adapted(
            "McEmbeddingBagCollectionAdapter", "mc_embedding_bag_collection", bag_configs()
        ),
        truth=False,
    ),
    "McEmbeddingCollectionAdapter": Module(
        lambda: _adapted(
            "McEmbeddingCollectionAdapter", "mc_embedding_collection", table_configs()
        ),
        truth=False,
    ),
    "ITEPEmbeddingBagCollection": Module(
        lambda: _itep(ITEPEmbeddingBagCollection, bag_collection()),
        truth=False,
        sharders=(ITEPEmbeddingBagCollectionSharder,),
    ),
    "ITEPEmbeddingCollection": Module(
        lambda: _itep(ITEPEmbeddingCollection, collection()),
        truth=False,
        sharders=(ITEPEmbeddingCollectionSharder,),
    ),
    "PECEmbeddingCollection": Module(_pec, sharders=(_pec_sharder,)),
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
    "DebugEmbeddingBagCollection": Module(
        lambda: _debugged("DebugEmbeddingBagCollection", bag_configs())
    ),
    "DebugEmbeddingCollection": Module(
        lambda: _debugged("DebugEmbeddingCollection", table_configs())
    ),
    "SparseArch of DLRM": Module(lambda: dlrm.SparseArch(bag_collection())),
    "SparseArch of DeepFM": Module(lambda: deepfm.SparseArch(bag_collection())),
    "PositionWeightedProcessor before an EmbeddingBagCollection": Module(ProcessedBefore),
    "a subclass of EmbeddingBagCollection": Module(lambda: Bags(tables=bag_configs())),
    "a subclass of EmbeddingCollection": Module(lambda: Sequences(tables=table_configs())),
    "a subclass of FeatureProcessedEmbeddingBagCollection": Module(
        partial(processed, kind=Processed)
    ),
    "a subclass of ManagedCollisionEmbeddingBagCollection": Module(
        partial(managed, kind=ManagedBags), truth=False
    ),
    "a subclass of ManagedCollisionEmbeddingCollection": Module(
        partial(managed, kind=ManagedSequences), truth=False
    ),
    "two modules with tables of equal names": Module(
        lambda: Two(bag_collection(), bag_collection()), width=4 * DIM
    ),
    "two EmbeddingCollections with tables of equal names": Module(
        lambda: Two(collection(), collection()), width=4 * DIM
    ),
    "one module at two places": Module(_twice, width=4 * DIM),
    "a parameter of two modules": Module(_shared_parameter, width=4 * DIM),
    "a table of two features": Module(
        lambda: EmbeddingBagCollection(tables=bag_configs(feature_names=FEATURES)[:1])
    ),
    "a table of two features of an EmbeddingCollection": Module(
        lambda: EmbeddingCollection(tables=table_configs(feature_names=FEATURES)[:1])
    ),
    "EmbeddingCollection, need_indices": Module(Indexed),
    **{
        f"EmbeddingCollection, {argument}": Module(
            partial(EmbeddingCollection, table_configs(), **{argument: value})
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


def vectors(found: Any, lengths: dict[str, Tensor], stored: ModelInput | None = None) -> Tensor:
    """The vectors of all rows, features next to each other; of sequences, the sums of a row.

    Args:
        found: what a module returned.
        lengths: ids of each row, by feature.
        stored: how rows gather their ids, where an EmbeddingCollection got those of partial IKJTs.
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
    if isinstance(found, Tensor):
        return found
    return _sums(found.values(), lengths)


def _gathered(found: JaggedTensor, feature: str, stored: ModelInput) -> Tensor:
    unique = stored.unique_rows(feature, found)
    return _sums(unique.values(), unique.lengths()).index_select(0, stored.inverse_lookup[feature])


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.arange(lengths.numel(), device=values.device)
    row_of = rows.repeat_interleave(lengths.to(rows).long())
    return values.new_zeros(lengths.numel(), DIM, dtype=torch.float32).index_add(
        0, row_of, values.float()
    )
