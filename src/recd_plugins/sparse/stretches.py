"""Rows as stretches of stored values, taken out of what was looked up for those values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugins.sparse.index_select import in_float32
from recd_plugins.sparse.jagged import positions_of_ranges


@dataclass(frozen=True)
class Stretches(Pipelineable):
    """U rows of one feature, each a stretch of the feature's stored values; they may overlap.

    Attributes:
        offsets: where each row begins, integer ``[U]``.
        lengths: values in each row, integer ``[U]``.
        total: the sum of ``lengths``, known here so that nothing waits for a device.
    """

    offsets: Tensor
    lengths: Tensor
    total: int

    def gather(self, values: Tensor) -> JaggedTensor:
        """The rows of ``values``, ``[num_values, ...]``.

        In the backward pass a value that rows share gets the sum of its gradients in each;
        of half precision it is made in float32.
        """
        positions = positions_of_ranges(self.offsets, self.lengths, self.total)
        select = partial(torch.index_select, dim=0, index=positions)
        return JaggedTensor(values=in_float32(select, values), lengths=self.lengths)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return replace(
            self,
            offsets=self.offsets.to(device, non_blocking=non_blocking),
            lengths=self.lengths.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        return replace(self, offsets=self.offsets.pin_memory(), lengths=self.lengths.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.offsets.record_stream(stream)
        self.lengths.record_stream(stream)
