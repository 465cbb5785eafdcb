"""Rows of a jagged tensor by index, without padding (RecD, section 5: jagged index select)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugins.sparse.jagged import positions_of_ranges, positions_of_rows

# What FBGEMM's kernels for CPU take; those for CUDA take these too.
_FBGEMM_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64}
# On CPU its kernels are the slower ones below (docs/sparse.md): they spend a fixed time a value.
_FBGEMM_CPU_WIDTH = 64
#: What a sum of gradients loses in: from 2048 and from 256 equal ones on it does not grow.
HALF_PRECISION = (torch.float16, torch.bfloat16)


def in_float32(select: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """``select(tensor)``; gradients of half precision are summed in float32."""
    if tensor.requires_grad and tensor.dtype in HALF_PRECISION:
        return select(tensor.float()).to(tensor.dtype)
    return select(tensor)


def index_select(rows: Tensor, index: Tensor) -> Tensor:
    """``rows.index_select(0, index)``, as ``in_float32``."""
    # Two dimensions: index_select is fast on rows.
    selected = in_float32(partial(torch.index_select, dim=0, index=index), rows.flatten(1))
    return selected.view(index.shape[0], *rows.shape[1:])  # len() is no symbol for torch.export


def jagged_index_select(jagged: JaggedTensor, rows: Tensor) -> JaggedTensor:
    """Rows of ``jagged`` in the order of ``rows``, with gradients for values and weights.

    A row that is taken several times gets the sum of its gradients. Memory grows with the values
    that are taken, whatever the longest row is.

    Args:
        jagged: U rows; values of any dtype, ids ``[num_values]`` or embeddings
            ``[num_values, ...]``.
        rows: rows to take, integer ``[n]``, each below U, in any order, repeats allowed.

    Returns:
        n rows, their lengths in the dtype that they have in ``jagged``.
    """
    values, weights = jagged.values(), jagged.weights_or_none()
    lengths = jagged.lengths()
    tensors = [values] if weights is None else [values, weights]
    if rows.numel() and _suit_fbgemm(tensors):
        taken = lengths.index_select(0, rows)
        select = partial(_by_fbgemm, lengths=lengths, rows=rows)
    else:
        positions, taken = positions_of_rows(jagged.offsets(), rows)
        select = partial(torch.index_select, dim=0, index=positions)
    return JaggedTensor(
        values=in_float32(select, values),
        lengths=taken.to(lengths.dtype),
        weights=None if weights is None else in_float32(select, weights),
    )


def _suit_fbgemm(tensors: list[Tensor]) -> bool:
    wide = _width(tensors[0]) >= _FBGEMM_CPU_WIDTH or tensors[0].device.type != "cpu"
    return wide and all(tensor.dtype in _FBGEMM_DTYPES for tensor in tensors)


def _by_fbgemm(tensor: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    # The kernels take two dimensions, no more and no fewer.
    flat = tensor.reshape(len(tensor), _width(tensor))
    selected: Tensor = torch.ops.fbgemm.jagged_index_select(flat, lengths, rows)[0]
    return selected.view(len(selected), *tensor.shape[1:])


def _width(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])


@dataclass(frozen=True)
class Segments(Pipelineable):
    """U rows of one feature, each a segment of the feature's stored values; they may overlap.

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
