"""Shards TieredEmbeddingCollections."""

from __future__ import annotations

from recd_plugin_flexshard.runtime.collection import TieredEmbeddingCollection
from recd_plugin_flexshard.runtime.sharded import ShardedTieredEmbeddingCollection
from recd_plugins.api import ExactEmbeddingCollectionSharder


class TieredEmbeddingCollectionSharder(ExactEmbeddingCollectionSharder):
    """Shards a TieredEmbeddingCollection: tiered tables row-wise, others in any way.

    DistributedModelParallel finds it by the module's type, next to the sharder of plain
    EmbeddingCollections.

    ``shard`` raises SetupError where a tiered table is not planned row-wise with the fused kernel,
    shares a feature with another table, or ranks and nodes do not fit together, and ExactnessError
    where the optimizer is none that copies of rows can follow.
    """

    @property
    def module_type(self) -> type[TieredEmbeddingCollection]:
        """What ``shard`` takes."""
        return TieredEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedTieredEmbeddingCollection]:
        """What ``shard`` returns."""
        return ShardedTieredEmbeddingCollection
