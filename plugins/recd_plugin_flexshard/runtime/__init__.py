"""Tables whose often read rows have copies: on every rank (hot) and in every node (flex)."""

from recd_plugin_flexshard.runtime.collection import RowTiers, TieredEmbeddingCollection
from recd_plugin_flexshard.runtime.groups import TierGroups, tier_groups
from recd_plugin_flexshard.runtime.sharded import (
    ShardedTieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)

__all__ = [
    "RowTiers",
    "ShardedTieredEmbeddingCollection",
    "TierGroups",
    "TieredEmbeddingCollection",
    "TieredEmbeddingCollectionSharder",
    "tier_groups",
]
