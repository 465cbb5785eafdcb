"""Puts TieredEmbeddingCollections where a model has EmbeddingCollections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugin_flexshard.runtime import TieredEmbeddingCollection
from recd_plugins.api import SetupError

if TYPE_CHECKING:
    from recd_plugin_flexshard.runtime import RowTiers
    from recd_plugin_flexshard.runtime.collection import CopyTier


def with_tiers(
    model: nn.Module,
    tiers: Mapping[str, RowTiers],
    retier_every: int | None,
    sparse: Collection[CopyTier] = (),
) -> nn.Module:
    """The model, with tiers for the tables that ``tiers`` names; paths and parameters stay.

    Tiers that other entries have put into a collection stay too; ``sparse`` are then those of any.

    Raises:
        SetupError: tables of one collection are to be retiered after different numbers of steps.
    """
    tiered = {
        module: _tiered(path, module, tiers, retier_every, sparse)
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingCollection)
        and any(config.name in tiers for config in module.embedding_configs())
    }
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, EmbeddingCollection) and child in tiered:
                setattr(parent, name, tiered[child])
    if isinstance(model, EmbeddingCollection):
        return tiered.get(model, model)
    return model


def _tiered(
    path: str,
    collection: EmbeddingCollection,
    tiers: Mapping[str, RowTiers],
    every: int | None,
    sparse: Collection[CopyTier],
) -> TieredEmbeddingCollection:
    names = [config.name for config in collection.embedding_configs()]
    chosen = {name: tiers[name] for name in names if name in tiers}
    if isinstance(collection, TieredEmbeddingCollection):
        if collection.retier_every != every:
            given = " and ".join(
                "null" if n is None else str(n) for n in (collection.retier_every, every)
            )
            raise SetupError(
                f"tables {', '.join([*collection.tiers, *chosen])} are in one "
                f"EmbeddingCollection ({path}), whose tiers are chosen anew together, but their "
                f"entries say retier_every {given}; give them one"
            )
        chosen = {**collection.tiers, **chosen}
        # A sum of touched rows sends at most a bit a row and rank more than one of all.
        sparse = collection.sparse.union(sparse)
    return TieredEmbeddingCollection(collection, chosen, every, sparse)
