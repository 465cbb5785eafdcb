"""Tables of the modules of the matrix, and their features."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

CPU = torch.device("cpu")
FEATURES = ["a", "b"]
ROWS, DIM, MAX_LENGTH = 24, 8, 4


def bags(**config: Any) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(**_config(name, config)) for name in FEATURES]


def tables(**config: Any) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**_config(name, config)) for name in FEATURES]


def _config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"t_{name}",
        "embedding_dim": DIM,
        "num_embeddings": ROWS,
        "feature_names": [name],
        **config,
    }
