"""A table of 8-bit numbers, each row with a scale and an offset of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Int8Rows(nn.Module):
    """The rows of ``weight`` as FBGEMM's fused 8-bit rows.

    TorchRec's inference modules have such rows too, with scales of 16 bits in place of 32.

    Args:
        weight: float32 ``[rows, dim]``.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        import fbgemm_gpu  # noqa: F401

        # Of each row its numbers, then scale and offset, two float32.
        packed = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight.detach().contiguous())
        dim = weight.shape[1]
        self.register_buffer("numbers", packed[:, :dim].contiguous())
        scales = packed[:, dim:].contiguous().view(torch.float32)
        self.register_buffer("scales", scales.contiguous())

    def forward(self, ids: Tensor) -> Tensor:
        """Float32 ``[num_ids, dim]``."""
        # Not by an index in brackets, to which -1 is the last row.
        scale, offset = self.scales.index_select(0, ids).unbind(1)
        return self.numbers.index_select(0, ids).float() * scale.unsqueeze(1) + offset.unsqueeze(1)

    numbers: Tensor
    scales: Tensor
