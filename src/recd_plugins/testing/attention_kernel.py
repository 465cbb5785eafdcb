"""CPU kernel for PyTorch's CUDA attention over packed rows, to test its callers without a GPU."""

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
    kernels: Any = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for key in ("CPU", "AutogradCPU"):
            kernels.impl("_efficient_attention_forward", _attend, key)
        yield
    finally:
        del kernels  # torch removes the kernels with the object


def _attend(
    query: Tensor, key: Tensor, value: Tensor, _bias: Any, *rows: Any, scale: float
) -> tuple[Any, ...]:
    if query.shape[3] * query.element_size() % 16:
        raise ValueError("the sizes of attention heads must be multiples of 16 bytes")
    output = []
    parts = _split(query, *rows[:4:2]), _split(key, *rows[1:4:2]), _split(value, *rows[1:4:2])
    for q, k, v in zip(*parts, strict=True):
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(2)
        output.append(torch.einsum("hqk,khd->qhd", weights, v))
    nothing = torch.zeros((), dtype=torch.int64)
    return torch.cat(output).unsqueeze(0), query.new_zeros(0), nothing, nothing, rows[2], rows[3]


def _split(packed: Tensor, borders: Tensor, most: int) -> tuple[Tensor, ...]:
    """Split packed values ``[1, num_values, heads, size]`` into rows."""
    sizes = borders.diff().tolist()
    if max(sizes, default=0) > most:
        raise ValueError(f"a row has more values than max_seqlen={most}")
    return torch.split(packed[0], sizes)
