"""An embedding table, as plugins are told of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """An embedding table of the model.

    Attributes:
        name: TorchRec's table name.
        features: the features that look it up.
        num_embeddings: rows.
        embedding_dim: scalars a row.
        pooled: True in an EmbeddingBagCollection, False in an EmbeddingCollection.
    """

    name: str
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooled: bool
