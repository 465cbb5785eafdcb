"""An EmbeddingCollection that knows which of its rows are to be on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torchrec import EmbeddingCollection


class HotCollection(EmbeddingCollection):
    """The tables and parameters of another collection.

    Args:
        collection: the other one; its own ``hot`` stay.
        hot: rows by table; those of other collections do no harm.
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
