"""Sharded tables with copies of frequently read rows on every rank (hot) or node (flex)."""

from recd_plugin_flexshard.runtime.collection import RowTiers, TieredEmbeddingCollection
from recd_plugin_flexshard.runtime.sharded import (
    ShardedTieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
    TierGroups,
    tier_groups,
)

__all__ = [
    "RowTiers",
    "ShardedTieredEmbeddingCollection",
    "TierGroups",
    "TieredEmbeddingCollection",
    "TieredEmbeddingCollectionSharder",
    "tier_groups",
]
