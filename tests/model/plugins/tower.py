"""``test.tower``: a model of a third party, whose tables have names of its own."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from recd_plugins.api import Model, ModelFeatures, Plugin, PluginOptions, hookimpl

if TYPE_CHECKING:
    from torch import nn


class Tower(Model):
    """One layer over the vectors of all features."""

    name = "test.tower"

    class Options(PluginOptions):
        dim: int = Field(default=4, gt=0, multiple_of=4, description="Scalars in an embedding.")
        rows: int = Field(default=100, gt=0, description="Rows of a table.")
        noise: bool = Field(default=False, description="Draw, and keep means that ranks differ in.")
        fault: str = Field(default="", description="What is wrong with it.")

    options: Options

    def build(self, features: ModelFeatures) -> nn.Module:
        if self.options.fault == "fails":
            raise ValueError("no weights")
        return _tower(features, self.options)


def _tower(features: ModelFeatures, options: Tower.Options) -> Any:
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torchrec import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    from recd_plugins.api import SequencePooling

    fault, dim = options.fault, options.dim

    class TowerModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes: Any = {"embedding_dim": dim, "num_embeddings": options.rows}
            tables = [
                EmbeddingBagConfig(name=f"ids_of_{name}", feature_names=[name], **sizes)
                for name in features.pooled
            ]
            together = fault == "mixes_copies"
            own = [t for t in tables if together or not features.replicates(t.name)]
            copies = [t for t in tables if t not in own]
            self.bags = EmbeddingBagCollection(tables=own) if own else None
            if fault == "torchrecs_sharder":
                self.bags = FeatureProcessedEmbeddingBagCollection(
                    EmbeddingBagCollection(tables=own, is_weighted=True),
                    PositionWeightedModuleCollection(dict.fromkeys(features.pooled, 10_000)),
                )
            self.replicated_bags = EmbeddingBagCollection(tables=copies) if copies else None
            table_of = {"one_name": features.pooled[0]}.get
            self.sequences = EmbeddingCollection(
                tables=[
                    EmbeddingConfig(
                        name=f"ids_of_{table_of(fault, name)}", feature_names=[name], **sizes
                    )
                    for name in features.sequence
                ]
            )
            self.pooling = SequencePooling(features.sequence, dim)
            # Values that a plan needs where it counts, and that the meta device has not.
            self.register_buffer("order", torch.arange(features.num_dense), persistent=False)
            # Large ones: of what ranks are taken to have alike, each writes some to a checkpoint.
            self.seen_0: torch.Tensor
            self.seen_1: torch.Tensor
            for number in range(2):
                self.register_buffer(f"seen_{number}", torch.zeros(10_000))
            num_sparse = len(features.pooled) + len(features.sequence)
            self.top = nn.Linear(features.num_dense + dim * num_sparse, 1)
            if fault == "other_weights":
                self.top.bias.data.add_(int(os.environ["RANK"]))
            if fault == "extra_state":
                keeps = type("Keeps", (nn.Linear,), {"get_extra_state": lambda _: torch.ones(1)})
                self.top = keeps(self.top.in_features, 1)
            self.names = [
                [name for name in features.pooled if features.replicates(f"ids_of_{name}") == of]
                for of in (False, True)
            ]

        def forward(self, batch: Any) -> Any:
            bags = None if self.bags is None else self.bags(batch.sparse_features)
            copies = None
            if self.replicated_bags is not None:
                copies = self.replicated_bags(batch.replicated_features)
            pooled = self.pooling(self.sequences(batch.sequence_features), batch)
            logits = self.logits(batch.dense_features, bags, copies, pooled)
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
            if fault == "no_logits":
                return loss, (loss.detach(), logits.detach() * torch.nan, batch.labels)
            return loss, (loss.detach(), logits.detach(), batch.labels)

        def logits(self, dense: Any, bags: Any, copies: Any, pooled: Any) -> Any:
            vectors = [dense.index_select(1, self.order), pooled.flatten(1)]
            for found, names in zip((bags, copies), self.names, strict=True):
                vectors += [found[name] for name in names]
            if options.noise and self.training:
                drawn = random.random() + np.random.rand() + np.random.randn()
                vectors[0] = F.dropout(vectors[0], 0.3) + drawn + random.gauss(0, 1)
            width = 3 if fault == "wrong_width" else None
            logits = self.top(torch.cat(vectors, dim=1)[:, :width]).squeeze(1)
            if options.noise:
                seen = [self.seen_0, self.seen_1]
                if self.training:
                    for each in seen:
                        each.lerp_(logits.detach().mean(), 0.5)
                logits = logits - torch.stack(seen).mean()
            return logits

    return TowerModule()


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Tower]
