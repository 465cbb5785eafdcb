"""How the vectors of a row's features meet, between embeddings and top MLP: ``architecture``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet

from recd_plugins.config.schema import ModelSpec


class DotInteraction(nn.Module):
    """DLRM's (arXiv 1906.00091, section 2.1): dot products of all pairs of n vectors.

    TorchRec's InteractionArch with one index select in place of an advanced index, whose backward
    pass takes longer than the products where there are a hundred vectors.

    Args:
        num_vectors: n, the dense features' one among them.
        dim: scalars in a vector.

    Attributes:
        out_features: ``dim + n * (n - 1) / 2``.
    """

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        self.pairs: Tensor
        self.out_features = dim + len(rows)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """The dense vector ``[B, dim]`` and the products of ``vectors``, ``[B, n, dim]``."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense, products.flatten(1).index_select(1, self.pairs)], dim=1)


class CrossInteraction(nn.Module):
    """A cross network over all vectors side by side, as TorchRec's InteractionDCNArch.

    DCN-v2 (arXiv 2008.13535) in its stacked form, the top MLP over the cross network; with vectors
    in place of matrices the cross layers of DCN (arXiv 1708.05123).

    Args:
        spec: says which cross network, and its sizes.
        num_vectors: n, the dense features' one among them.

    Attributes:
        out_features: ``n * dim``, also that of the inputs.
    """

    def __init__(self, spec: ModelSpec, num_vectors: int) -> None:
        super().__init__()
        self.out_features = num_vectors * spec.embedding_dim
        self.crossnet = _cross_net(spec, self.out_features)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:  # noqa: ARG002
        """``vectors``, ``[B, n, dim]`` with the dense one among them, crossed: ``[B, n * dim]``."""
        crossed: Tensor = self.crossnet(vectors.flatten(1))
        return crossed


def interaction_of(spec: ModelSpec, num_vectors: int) -> DotInteraction | CrossInteraction:
    """The interaction of ``num_vectors`` vectors that ``spec.architecture`` names."""
    if spec.architecture == "dcn":
        return CrossInteraction(spec, num_vectors)
    return DotInteraction(num_vectors, spec.embedding_dim)


def _cross_net(spec: ModelSpec, in_features: int) -> nn.Module:
    if spec.cross_net == "full":
        return CrossNet(in_features, spec.cross_layers)
    if spec.cross_net == "vector":
        return VectorCrossNet(in_features, spec.cross_layers)
    # A quarter keeps about the accuracy of square matrices, says TorchRec's documentation.
    low_rank_dim = spec.low_rank_dim or max(1, in_features // 4)
    return LowRankCrossNet(in_features, spec.cross_layers, low_rank_dim)
