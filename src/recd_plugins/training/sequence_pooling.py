"""Sequence features: pooled over unique rows, then repeated for their duplicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.data.model_input import ModelInput


class SequencePooling(nn.Module):
    """Pools the outputs of an EmbeddingCollection, one pooling module a feature.

    A model holds one without pooling modules; ``Registry.prepare`` puts in what the registry names.
    The compute that deduplication saves is saved here: the modules see unique rows, and only their
    results are repeated, by one index select (RecD, section 5).
    """

    def __init__(self, features: Sequence[str], embedding_dim: int) -> None:
        super().__init__()
        self.features = tuple(features)
        self.embedding_dim = embedding_dim
        self.poolings = nn.ModuleDict()

    def forward(self, embeddings: dict[str, JaggedTensor], batch: ModelInput) -> Tensor:
        """Vectors of all rows, ``[B, num_features, embedding_dim]``.

        Args:
            embeddings: what the EmbeddingCollection made of ``batch.sequence_features``.
            batch: says how many rows of each feature are unique, and which row is which.
        """
        pooled = []
        for feature in self.features:
            sequences = embeddings[feature]
            unique = JaggedTensor(
                values=sequences.values(), lengths=sequences.lengths()[: batch.num_unique[feature]]
            )
            vectors = self.poolings[feature](unique)
            inverse = batch.inverse_lookup.get(feature)
            pooled.append(vectors if inverse is None else vectors.index_select(0, inverse))
        return torch.stack(pooled, dim=1)
