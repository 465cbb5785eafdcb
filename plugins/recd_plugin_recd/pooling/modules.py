"""Modules that pool a jagged tensor of embeddings to one vector a row; empty rows give zeros."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor


class Mean(nn.Module):
    """Mean over each row: ``[num_values, D]`` over R rows to ``[R, D]``."""

    def forward(self, sequences: JaggedTensor) -> Tensor:
        return _row_means(sequences.values(), sequences.lengths())


class SelfAttention(nn.Module):
    """Multi-head self-attention within each row, the mean of its outputs, an output projection.

    The projections run on the packed values, without padding. Since the output projection is
    linear it is applied after the mean, to R rows instead of all values; the result is the same.
    """

    def __init__(self, embedding_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_projection = nn.Linear(embedding_dim, 3 * embedding_dim)
        self.out_projection = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, sequences: JaggedTensor) -> Tensor:
        lengths, offsets = sequences.lengths(), sequences.offsets()
        num_rows = lengths.numel()
        dim = self.out_projection.in_features
        if sequences.values().numel() == 0:
            # The zeros stay attached to every parameter: data-parallel training waits for each.
            touched = self.in_projection.weight.sum() + self.in_projection.bias.sum()
            touched = touched + self.out_projection.weight.sum() + self.out_projection.bias.sum()
            return sequences.values().new_zeros(num_rows, dim) + touched * 0
        longest = int(lengths.max())
        packed = self.in_projection(sequences.values())
        padded = torch.ops.fbgemm.jagged_to_padded_dense(packed, [offsets], [longest], 0.0)
        query, key, value = padded.view(
            num_rows, longest, 3, self.heads, dim // self.heads
        ).permute(2, 0, 3, 1, 4)
        # An empty row attends to its padding instead of to nothing, which would give NaN.
        position = torch.arange(longest, device=lengths.device)
        valid = position < lengths.clamp(min=1).unsqueeze(1)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=valid[:, None, None, :]
        )
        weights = (position < lengths.unsqueeze(1)).to(attended.dtype)
        weights = weights / lengths.clamp(min=1).unsqueeze(1)
        means = torch.einsum("rhld,rl->rhd", attended, weights).reshape(num_rows, dim)
        return self.out_projection(means) * (lengths > 0).unsqueeze(1)


def _row_means(values: Tensor, lengths: Tensor) -> Tensor:
    sums = torch.segment_reduce(values, "sum", lengths=lengths, axis=0, initial=0, unsafe=True)
    return sums / lengths.clamp(min=1).unsqueeze(1)
