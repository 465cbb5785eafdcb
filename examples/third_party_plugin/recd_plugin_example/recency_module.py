"""The module of ``example.recency``: in a file of its own, since it needs torch to be defined."""

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor


class RecencyPooling(nn.Module):
    """Embeddings ``[num_values, D]`` of rows, oldest first, to vectors ``[num_rows, D]``."""

    def __init__(self, half_life: float) -> None:
        super().__init__()
        self.half_life = half_life

    def forward(self, sequences: JaggedTensor) -> Tensor:
        values, lengths = sequences.values(), sequences.lengths().long()
        num_rows = lengths.numel()
        row = torch.repeat_interleave(torch.arange(num_rows, device=lengths.device), lengths)
        age = lengths.cumsum(0)[row] - 1 - torch.arange(row.numel(), device=row.device)
        weights = torch.exp2(-age.to(values.dtype) / self.half_life)
        total = values.new_zeros(num_rows).index_add(0, row, weights)
        weighted = values * (weights / total[row]).unsqueeze(1)
        return values.new_zeros(num_rows, values.size(1)).index_add(0, row, weighted)
