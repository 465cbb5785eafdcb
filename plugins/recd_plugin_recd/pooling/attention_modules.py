"""Multi-head self-attention over rows of embeddings, then the mean of its outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.packed_rows import row_means
from recd_plugin_recd.pooling.traced_rows import attention_rows


class SelfAttention(nn.Module):
    """Multi-head self-attention within each row, the mean of its outputs, an output projection.

    Since the output projection is linear it is applied after the mean, to rows instead of all
    values; the result is the same.
    """

    def __init__(self, embedding_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_projection = nn.Linear(embedding_dim, 3 * embedding_dim)
        self.out_projection = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, sequences: JaggedTensor) -> Tensor:
        """``[num_values, D]`` over R rows to ``[R, D]``."""
        return pool_by_attention([self], [sequences])[0]


def pool_by_attention(
    modules: Sequence[SelfAttention], sequences: Sequence[JaggedTensor]
) -> list[Tensor]:
    """One attention over the rows of all features, each with its own projections.

    Returns:
        ``[R, D]`` for each feature, R being its own number of rows.
    """
    rows = attention_rows(sequences)
    projected = [
        module.in_projection(sequence.values())
        for module, sequence in zip(modules, sequences, strict=True)
    ]
    attended = rows.self_attention(torch.cat(projected), modules[0].heads)
    means = torch.split(row_means(attended, rows.lengths), rows.num_rows)
    pooled = [module.out_projection(mean) for module, mean in zip(modules, means, strict=True)]
    return rows.zero_where_empty(pooled)
