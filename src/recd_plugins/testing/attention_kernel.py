"""CPU kernels for PyTorch's CUDA attention over packed rows, to test its callers without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    if query.shape[3] * query.element_size() % 16:
        raise ValueError("the sizes of attention heads must be multiples of 16 bytes")
    parts = zip(*_split(rows, [query], [key, value]), strict=True)
    output = [torch.einsum("hqk,khd->qhd", _weights(q, k, scale), v) for q, k, v in parts]
    nothing = torch.zeros((), dtype=torch.int64)
    packed = torch.cat(output).unsqueeze(0)
    return packed, query.new_zeros(0), nothing, nothing, rows[2], rows[3]


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
    found: list[list[Tensor]] = [[], [], []]
    for q, g, k, v in zip(*_split(rows, [query, gradient], [key, value]), strict=True):
        weights = _weights(q, k, scale)
        of_weights = torch.einsum("qhd,khd->hqk", g, v)
        of_scores = (of_weights - (of_weights * weights).sum(2, keepdim=True)) * weights * scale
        found[0].append(torch.einsum("hqk,khd->qhd", of_scores, k))
        found[1].append(torch.einsum("hqk,qhd->khd", of_scores, q))
        found[2].append(torch.einsum("hqk,qhd->khd", weights, g))
    of_query, of_key, of_value = (torch.cat(each).unsqueeze(0) for each in found)
    return of_query, of_key, of_value, query.new_zeros(0)


def _split(
    rows: Sequence[Any], queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> list[Sequence[Tensor]]:
    """Split packed values ``[1, num_values, heads, size]`` into rows."""
    parts: list[Sequence[Tensor]] = []
    for packed, borders, most in ((queries, rows[0], rows[2]), (keys, rows[1], rows[3])):
        sizes = borders.diff().tolist()
        if max(sizes, default=0) > most:
            raise ValueError(f"a row has more values than max_seqlen={most}")
        parts += [torch.split(each[0], sizes) for each in packed]
    return parts


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return attention weights ``[heads, queries, keys]`` of a row."""
    return (torch.einsum("qhd,khd->hqk", query, key) * scale).softmax(2)
