"""The ``nn.Module`` of ``example.recency``, in a separate file so that torch is imported late."""

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor


class RecencyPooling(nn.Module):
    """Pools embeddings of sequences, oldest first: ``[num_values, D]`` to ``[num_rows, D]``."""

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
