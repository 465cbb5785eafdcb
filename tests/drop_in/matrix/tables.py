"""Tables of the modules of the matrix, and their features."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

FEATURES = ["a", "b"]
ROWS, DIM, MAX_LENGTH = 24, 8, 4
#: Values other than the default, of fields of a table's config but those of ``_config``, its
#: pooling and its data type.
FIELDS: dict[str, Any] = {
    "weight_init_max": 2.0,
    "weight_init_min": -2.0,
    "num_embeddings_post_pruning": ROWS // 2,
    "init_fn": torch.nn.init.ones_,
    "need_pos": True,
    "input_dim": 2 * ROWS,
    "total_num_buckets": 4,
    "use_virtual_table": True,
    "virtual_table_eviction_policy": CountBasedEvictionPolicy(eviction_threshold=1),
    "enable_embedding_update": True,
    "stash_weights": True,
}


def bags(**config: Any) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(**_config(name, config)) for name in FEATURES]


def tables(**config: Any) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**_config(name, config)) for name in FEATURES]


def bag_collection(**config: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=bags(**config))


def collection(**config: Any) -> EmbeddingCollection:
    return EmbeddingCollection(tables=tables(**config))


def _config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"t_{name}",
        "embedding_dim": DIM,
        "num_embeddings": ROWS,
        "feature_names": [name],
        **config,
    }
