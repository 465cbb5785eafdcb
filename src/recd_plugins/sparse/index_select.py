"""Selection of jagged rows by index, without padding (jagged index select in RecD, section 5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.sparse.jagged import positions_of_ranges, positions_of_rows
from recd_plugins.sparse.movable import Movable

# Dtypes that FBGEMM's CPU and CUDA kernels support.
_FBGEMM_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64}
# Below this width, FBGEMM's CPU kernels are slower than torch.
_FBGEMM_CPU_WIDTH = 64
#: Dtypes in which sums of equal gradients stop growing, after 2048 and 256 terms.
HALF_PRECISION = (torch.float16, torch.bfloat16)


def in_float32(select: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return ``select(tensor)``. In backward, half-precision gradients are summed in float32."""
    if tensor.requires_grad and tensor.dtype in HALF_PRECISION:
        return select(tensor.float()).to(tensor.dtype)
    return select(tensor)


def index_select(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows.index_select(0, index)``. Half-precision gradients are summed in float32."""
    # Flatten to two dimensions: index_select is fast on rows.
    flat = rows.flatten(1) if rows.ndim > 1 else rows
    selected = in_float32(partial(torch.index_select, dim=0, index=index), flat)
    return selected.view(index.shape[0], *rows.shape[1:])  # len() is not symbolic in torch.export


def jagged_index_select(jagged: JaggedTensor, rows: Tensor) -> JaggedTensor:
    """Return the rows of ``jagged`` at the given indices, with gradients.

    The gradient of a row that is selected several times is the sum over its occurrences. Memory use
    is proportional to the number of selected values.

    Args:
        jagged: jagged tensor of U rows, with ids ``[num_values]`` or embeddings
            ``[num_values, ...]`` of any dtype.
        rows: row indices, integer ``[n]``, in any order and with duplicates allowed.

    Returns:
        Jagged tensor of n rows. Lengths have the dtype of ``jagged.lengths()``.
    """
    values, weights = jagged.values(), jagged.weights_or_none()
    lengths = jagged.lengths()
    tensors = [values] if weights is None else [values, weights]
    wide = _width(values) >= _FBGEMM_CPU_WIDTH or values.device.type != "cpu"
    if rows.numel() and wide and all(tensor.dtype in _FBGEMM_DTYPES for tensor in tensors):
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


def _by_fbgemm(tensor: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    # The kernels need two dimensions.
    flat = tensor.reshape(len(tensor), _width(tensor))
    selected: Tensor = torch.ops.fbgemm.jagged_index_select(flat, lengths, rows)[0]
    return selected.view(len(selected), *tensor.shape[1:])


def _width(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])


@dataclass(frozen=True)
class Segments(Movable):
    """Positions of U rows of one feature in its stored values. Rows may overlap.

    Attributes:
        offsets: index of each row's first value, integer ``[U]``.
        lengths: number of values in each row, integer ``[U]``.
        total: sum of ``lengths``, stored to avoid a device synchronization.
    """

    TENSORS = ("offsets", "lengths")

    offsets: Tensor
    lengths: Tensor
    total: int

    def gather(self, values: Tensor) -> JaggedTensor:
        """Return a jagged tensor of U rows, copied from stored ``values`` ``[num_values, ...]``.

        The gradient of a value in several rows is summed, in float32 for half precision.
        """
        positions = positions_of_ranges(self.offsets, self.lengths, self.total)
        select = partial(torch.index_select, dim=0, index=positions)
        return JaggedTensor(values=in_float32(select, values), lengths=self.lengths)
