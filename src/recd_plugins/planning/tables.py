"""The embedding tables of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.interfaces import Table


def rows_by_feature(tables: Iterable[Table]) -> dict[str, int]:
    """How many ids a feature may have: the rows of the smallest table that it looks up."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.features:
            rows[feature] = min(rows.get(feature, table.num_embeddings), table.num_embeddings)
    return rows


def tables_of(model: nn.Module) -> list[Table]:
    """The tables of the unsharded EmbeddingBagCollections and EmbeddingCollections of ``model``."""
    tables: list[Table] = []
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            configs, pooled = module.embedding_bag_configs(), True
        elif isinstance(module, EmbeddingCollection):
            configs, pooled = module.embedding_configs(), False
        else:
            continue
        tables += [
            Table(
                name=config.name,
                features=tuple(config.feature_names),
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                pooled=pooled,
            )
            for config in configs
        ]
    return tables
