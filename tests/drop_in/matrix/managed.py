"""Modules whose ids are mapped before they are looked up: managed collision, ITEP and PEC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.drop_in.matrix.tables import ROWS, bags, tables
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)

from recd_plugins.testing.device import DEVICE

IDS = 4000


class ManagedBags(ManagedCollisionEmbeddingBagCollection):
    """A trainer's subclass."""


class ManagedSequences(ManagedCollisionEmbeddingCollection):
    """A trainer's subclass."""


def _mch(policy: type = DistanceLFU_EvictionPolicy) -> ManagedCollisionModule:
    return MCHManagedCollisionModule(
        zch_size=ROWS,
        device=DEVICE,
        eviction_policy=policy(),
        eviction_interval=100,
        input_hash_size=IDS,
    )


def _hash() -> ManagedCollisionModule:
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    return HashZchManagedCollisionModule(
        zch_size=ROWS, device=DEVICE, total_num_buckets=2, max_probe=4, input_hash_size=IDS
    )


def _maps(configs: Any, make: Callable[[], ManagedCollisionModule]) -> ManagedCollisionCollection:
    return ManagedCollisionCollection({config.name: make() for config in configs}, configs)


def managed_bags(
    make: Callable[[], ManagedCollisionModule] = _mch,
    kind: type[nn.Module] = ManagedCollisionEmbeddingBagCollection,
) -> nn.Module:
    inside = EmbeddingBagCollection(tables=bags())
    return kind(inside, _maps(inside.embedding_bag_configs(), make))


def managed_sequences(
    make: Callable[[], ManagedCollisionModule] = _mch,
    kind: type[nn.Module] = ManagedCollisionEmbeddingCollection,
) -> nn.Module:
    inside = EmbeddingCollection(tables=tables())
    return kind(inside, _maps(inside.embedding_configs(), make))


def with_policy(policy: type) -> Callable[[], nn.Module]:
    return lambda: managed_bags(lambda: _mch(policy))


def hashed_bags() -> nn.Module:
    return managed_bags(_hash)


def hashed_sequences() -> nn.Module:
    return managed_sequences(_hash)


def adapted(pooled: bool) -> nn.Module:
    """As TorchRec's adapters make them, but that their tables are on the DEVICE, and not meta."""
    from torchrec.modules.mc_adapter import (
        McEmbeddingBagCollectionAdapter,
        McEmbeddingCollectionAdapter,
    )

    how: dict[str, Any] = {"device": DEVICE, "world_size": 2, "zch_method": "sort_zch"}
    how |= {"input_hash_size": IDS, "eviction_interval": 100}
    made: Any
    if pooled:
        made = McEmbeddingBagCollectionAdapter(bags(), **how)
        inside = made.mc_embedding_bag_collection._embedding_module
    else:
        made = McEmbeddingCollectionAdapter(tables(), **how)
        inside = made.mc_embedding_collection._embedding_module
    for table in inside.to_empty(device=DEVICE).parameters():
        nn.init.uniform_(table, -0.2, 0.2)
    adapter: nn.Module = made
    return adapter


def itep(pooled: bool) -> nn.Module:
    pruning = GenericITEPModule(dict.fromkeys(["t_a", "t_b"], 2 * ROWS), enable_pruning=False)
    if pooled:
        return ITEPEmbeddingBagCollection(EmbeddingBagCollection(tables=bags()), pruning)
    return ITEPEmbeddingCollection(EmbeddingCollection(tables=tables()), pruning)


def pec() -> nn.Module:
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

    return PECEmbeddingCollection(EmbeddingCollection(tables=tables()))


def pec_sharder() -> Any:
    from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder

    return PECEmbeddingCollectionSharder()


POLICIES = {"LFU": LFU_EvictionPolicy, "LRU": LRU_EvictionPolicy}
