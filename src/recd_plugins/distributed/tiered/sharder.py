"""Shards TieredEmbeddingCollections."""

from __future__ import annotations

import torch
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection

from recd_plugins.distributed.sharders import ExactEmbeddingCollectionSharder
from recd_plugins.distributed.tiered.collection import TieredEmbeddingCollection
from recd_plugins.distributed.tiered.sharded import ShardedTieredEmbeddingCollection


class TieredEmbeddingCollectionSharder(ExactEmbeddingCollectionSharder):
    """Shards a TieredEmbeddingCollection: tiered tables row-wise, others in any way.

    DistributedModelParallel finds it by the module's type, next to the sharder of plain
    EmbeddingCollections.
    """

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTieredEmbeddingCollection:
        """See TorchRec's ``ModuleSharder.shard``.

        Raises:
            SetupError: a tiered table is not planned row-wise with the fused kernel, shares a
                feature with another table, or ranks and nodes do not fit together.
            ExactnessError: the optimizer is none that copies of rows can follow.
        """
        assert isinstance(module, TieredEmbeddingCollection)
        return ShardedTieredEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def module_type(self) -> type[TieredEmbeddingCollection]:
        """What ``shard`` takes."""
        return TieredEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedTieredEmbeddingCollection]:
        """What ``shard`` returns."""
        return ShardedTieredEmbeddingCollection
