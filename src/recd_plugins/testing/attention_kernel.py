"""CPU kernels for PyTorch's CUDA attention over packed rows, to test its callers without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, library

__all__ = ["attention_kernel"]


@contextmanager
def attention_kernel() -> Iterator[None]:
    """Let ``torch.ops.aten._efficient_attention_forward`` and its gradient run on the CPU.

    Supports ``cu_seqlens`` without bias, mask and dropout. Raises ValueError for rows that are
    longer than ``max_seqlen``, which CUDA would cut off, and for heads that CUDA cannot load.
    """
    kernels: Any = library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    try:
        kernels.impl("_efficient_attention_forward", _forward)
        kernels.impl("_efficient_attention_backward", _backward)
        yield
    finally:
        del kernels  # torch removes the kernels with the object


def _forward(
    query: Tensor, key: Tensor, value: Tensor, _bias: Any, *rows: Any, scale: float
) -> tuple[Any, ...]:
    query_rows, key_rows = _Rows(rows[0], rows[2]), _Rows(rows[1], rows[3])
    if query.shape[3] * query.element_size() % 16:
        raise ValueError("the sizes of attention heads must be multiples of 16 bytes")
    weights = _weights(query_rows.pad(query), key_rows.pad(key), key_rows, scale)
    output = query_rows.pack(torch.einsum("rhqk,rkhd->rqhd", weights, key_rows.pad(value)))
    nothing = torch.zeros((), dtype=torch.int64)
    return output, query.new_zeros(0), nothing, nothing, rows[2], rows[3]


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _bias: Any,
    _output: Tensor,
    *rows: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query_rows, key_rows = _Rows(rows[0], rows[2]), _Rows(rows[1], rows[3])
    query, gradient = query_rows.pad(query), query_rows.pad(gradient)
    key, value = key_rows.pad(key), key_rows.pad(value)
    weights = _weights(query, key, key_rows, scale)
    of_weights = torch.einsum("rqhd,rkhd->rhqk", gradient, value)
    of_scores = (of_weights - (of_weights * weights).sum(3, keepdim=True)) * weights * scale
    return (
        query_rows.pack(torch.einsum("rhqk,rkhd->rqhd", of_scores, key)),
        key_rows.pack(torch.einsum("rhqk,rqhd->rkhd", of_scores, query)),
        key_rows.pack(torch.einsum("rhqk,rqhd->rkhd", weights, gradient)),
        query.new_zeros(0),
    )


class _Rows:
    """Borders of rows in packed values ``[1, num_values, heads, size]``."""

    def __init__(self, borders: Tensor, most: int) -> None:
        self.valid = torch.arange(most) < borders.diff().unsqueeze(1)
        if int(self.valid.sum()) != int(borders[-1]):
            raise ValueError(f"a row has more values than max_seqlen={most}")

    def pad(self, values: Tensor) -> Tensor:
        padded = values.new_zeros(*self.valid.shape, *values.shape[2:])
        padded[self.valid] = values[0]
        return padded

    def pack(self, padded: Tensor) -> Tensor:
        return padded[self.valid].unsqueeze(0)


def _weights(query: Tensor, key: Tensor, keys: _Rows, scale: float) -> Tensor:
    """Return attention weights ``[rows, heads, queries, keys]``, zeros for padding."""
    scores = torch.einsum("rqhd,rkhd->rhqk", query, key) * scale
    scores = scores.masked_fill(~keys.valid[:, None, None, :], -torch.inf)
    return scores.softmax(3).nan_to_num(0.0)
