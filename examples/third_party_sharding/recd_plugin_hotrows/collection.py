"""An EmbeddingCollection that lists its hot rows, which get copies on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torchrec import EmbeddingCollection


class HotCollection(EmbeddingCollection):
    """Shares the tables and parameters of ``collection``, and adds a list of hot rows.

    Args:
        collection: collection to share. If it has ``hot`` rows already, they are kept.
        hot: row numbers, keyed by table name. Tables of other collections are ignored.
    """

    def __init__(self, collection: EmbeddingCollection, hot: Mapping[str, np.ndarray]) -> None:
        super().__init__(tables=collection.embedding_configs(), device=collection.device)
        self.embeddings = collection.embeddings
        self.hot = {
            **getattr(collection, "hot", {}),
            **{
                config.name: torch.from_numpy(np.sort(hot[config.name]))
                for config in collection.embedding_configs()
                if config.name in hot
            },
        }
