"""Sequence features: pooled over unique rows, then repeated for their duplicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.data.model_input import ModelInput
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Pooling
from recd_plugins.plugin_call import plugin_call


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
        # By feature with a prefix: a ModuleDict takes no key like `items`, a name of its own.
        self.poolings = nn.ModuleDict()
        self.pooled_by: dict[str, str] = {}

    def put(self, feature: str, plugin: Pooling) -> None:
        """Have ``plugin`` pool ``feature``.

        Raises:
            PluginError: it fails, or builds no module.
        """
        with plugin_call(plugin, f"build for feature {feature}"):
            module = plugin.build(self.embedding_dim)
        if not isinstance(module, nn.Module):
            raise PluginError(
                f"{plugin.name}: build for feature {feature} returned {module!r}; expected a "
                "torch.nn.Module"
            )
        self.poolings[_key(feature)] = module
        self.pooled_by[feature] = plugin.name

    def forward(self, embeddings: dict[str, JaggedTensor], batch: ModelInput) -> Tensor:
        """Vectors of all rows, ``[B, num_features, embedding_dim]``.

        Args:
            embeddings: what the EmbeddingCollection made of ``batch.sequence_features``.
            batch: says how many rows of each feature are unique, and which row is which.

        Raises:
            PluginError: a pooling returned another shape than ``[num_rows, embedding_dim]``.
        """
        pooled = []
        for feature in self.features:
            unique = batch.unique_rows(feature, embeddings[feature])
            vectors = self.poolings[_key(feature)](unique)
            self._check(feature, vectors, batch.num_unique[feature])
            inverse = batch.inverse_lookup.get(feature)
            pooled.append(vectors if inverse is None else vectors.index_select(0, inverse))
        return torch.stack(pooled, dim=1)

    def _check(self, feature: str, vectors: Tensor, num_rows: int) -> None:
        shape = tuple(getattr(vectors, "shape", ()))
        if shape != (num_rows, self.embedding_dim):
            name = self.pooled_by[feature]
            found = list(shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise PluginError(
                f"{name}: pooling feature {feature} gave {found}; expected "
                f"[{num_rows}, {self.embedding_dim}], one vector of embedding_dim a row"
            )


def _key(feature: str) -> str:
    return f"of_{feature}"
