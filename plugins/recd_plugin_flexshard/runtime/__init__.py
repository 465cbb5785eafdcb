"""Tables whose often read rows have copies: on every rank (hot) and in every node (flex)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recd_plugin_flexshard.runtime.collection import TieredEmbeddingCollection
    from recd_plugin_flexshard.runtime.groups import TierGroups, tier_groups
    from recd_plugin_flexshard.runtime.sharded import ShardedTieredEmbeddingCollection
    from recd_plugin_flexshard.runtime.sharder import TieredEmbeddingCollectionSharder
    from recd_plugin_flexshard.runtime.tiers import RowTiers

_HOME = {
    "RowTiers": "tiers",
    "ShardedTieredEmbeddingCollection": "sharded",
    "TierGroups": "groups",
    "TieredEmbeddingCollection": "collection",
    "TieredEmbeddingCollectionSharder": "sharder",
    "tier_groups": "groups",
}

__all__ = [
    "RowTiers",
    "ShardedTieredEmbeddingCollection",
    "TierGroups",
    "TieredEmbeddingCollection",
    "TieredEmbeddingCollectionSharder",
    "tier_groups",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: a plan of tiers needs no torch."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
