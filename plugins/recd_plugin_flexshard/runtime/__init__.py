"""Sharded tables with copies of frequent rows on every rank (hot rows) or node (flex rows)."""

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
