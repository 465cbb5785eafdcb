from __future__ import annotations

from typing import Any

from recd_plugins.api import Model, ModelFeatures, PluginOptions, hookimpl


class Zch(Model):
    """Collision maps with eviction before tables of 64 rows, and one layer."""

    name = "test.zch"

    class Options(PluginOptions):
        one_table: bool = False

    options: Options

    def build(self, features: ModelFeatures) -> Any:
        import torch
        from torch import nn
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
        from torchrec.modules.mc_modules import (
            LFU_EvictionPolicy,
            ManagedCollisionCollection,
            MCHManagedCollisionModule,
        )

        names = features.pooled
        of_tables = [names] if self.options.one_table else [[name] for name in names]
        sizes: Any = {"embedding_dim": 4, "num_embeddings": 64}
        configs = [
            EmbeddingBagConfig(name=f"t_{of_table[0]}", feature_names=[*of_table], **sizes)
            for of_table in of_tables
        ]
        maps: Any = {
            config.name: MCHManagedCollisionModule(
                zch_size=config.num_embeddings,
                device=torch.device("cpu"),
                eviction_policy=LFU_EvictionPolicy(),
                eviction_interval=3,
                input_hash_size=1 << 62,
            )
            for config in configs
        }
        tables = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=configs),
            ManagedCollisionCollection(maps, configs),
            return_remapped_features=True,
        )

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tables = tables
                self.top = nn.Linear(4 * len(names), 1)

            def forward(self, batch: Any) -> Any:
                found, _ = self.tables(batch.sparse_features)
                logits = self.top(torch.cat([found[name] for name in names], dim=1)).squeeze(1)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
                return loss, (loss.detach(), logits.detach(), batch.labels)

        return Net()


@hookimpl
def register_plugins() -> Any:
    return [Zch]
