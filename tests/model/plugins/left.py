"""``test.left``: a model whose tables TorchRec's own sharder takes, as bags with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recd_plugins.api import Model, ModelFeatures, Plugin, hookimpl

if TYPE_CHECKING:
    from torch import nn

_DIM, _ROWS, _MOST_IDS = 4, 100, 10_000


class Left(Model):
    """Bags whose ids have weights by their places."""

    name = "test.left"

    def build(self, features: ModelFeatures) -> nn.Module:
        return _left(features)


def _left(features: ModelFeatures) -> Any:
    from torch import nn
    from torch.nn import functional as F
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    class LeftModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                EmbeddingBagConfig(
                    name=f"ids_of_{name}",
                    embedding_dim=_DIM,
                    num_embeddings=_ROWS,
                    feature_names=[name],
                )
                for name in features.pooled
            ]
            self.bags = FeatureProcessedEmbeddingBagCollection(
                EmbeddingBagCollection(tables=tables, is_weighted=True),
                PositionWeightedModuleCollection(dict.fromkeys(features.pooled, _MOST_IDS)),
            )
            self.top = nn.Linear(_DIM * len(tables), 1)

        def forward(self, batch: Any) -> Any:
            logits = self.top(self.bags(batch.sparse_features).values()).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
            return loss, (loss.detach(), logits.detach(), batch.labels)

    return LeftModule()


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Left]
