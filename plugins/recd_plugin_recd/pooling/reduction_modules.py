"""Sum, mean and maximum over the rows of jagged embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.packed_rows import pool_bags


class Reduction(nn.Module):
    """``[num_values, D]`` over R rows to ``[R, D]``, by ``sum``, ``mean`` or ``max``."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, sequences: JaggedTensor) -> Tensor:
        return reduce_rows([sequences], self.mode)[:, 0]


def reduce_rows(sequences: Sequence[JaggedTensor], mode: str) -> Tensor:
    """All features in one call, ``[R, num_features, D]``."""
    values = torch.cat([sequence.values() for sequence in sequences])
    lengths = torch.cat([sequence.lengths() for sequence in sequences])
    pooled = pool_bags(values, lengths, mode)
    return pooled.view(len(sequences), -1, pooled.shape[1]).transpose(0, 1)
