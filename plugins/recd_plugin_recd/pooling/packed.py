"""Attention pooling on CUDA: few kernel launches, and no waiting for the device.

Rows of different lengths stay packed. The attention kernel gets row offsets as ``cu_seqlens``.
The linear layers of several features run as one batched product, for which the values of each
feature are padded to the largest feature. All sizes are known on the host: they come from shapes
and from ``jagged.longest_row``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.rows import is_traced
from recd_plugins.api import jagged, stored_gradients

#: Dtypes of the attention kernel.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Maximum number of rows in a call: the kernel has one block per row in a grid dimension.
_MOST_ROWS = 65_535
#: Number of padding elements that cost less than the launches of another call.
_MOST_PADDING = 4_194_304


def can_pack(sequences: Sequence[JaggedTensor]) -> bool:
    """Return whether the sequences are on CUDA, and the attention kernel supports them."""
    values = sequences[0].values()
    return (
        values.device.type == "cuda"
        and not is_traced()
        and values.dtype in _DTYPES
        and all(sequence.lengths().numel() <= _MOST_ROWS for sequence in sequences)
    )


def pool_packed(
    pool: Callable[[Sequence[Any], PackedRows], Tensor],
    groups: Sequence[tuple[Sequence[Any], Sequence[JaggedTensor]]],
) -> list[Tensor]:
    """Pool the features of all groups in one call, or in a few to limit padding and rows per call.

    Args:
        pool: function of the modules and rows of F features that returns ``[F, R, D]``.
        groups: per group, the module and the sequence of each feature.

    Returns:
        ``[num_rows, num_features, D]`` per group.
    """
    modules = [module for of_group, _ in groups for module in of_group]
    sequences = [sequence for _, of_group in groups for sequence in of_group]
    num_rows = [sequence.lengths().numel() for sequence in sequences]
    sizes = [sequence.values().numel() for sequence in sequences]
    stacks = _stacks(sizes, max(num_rows))
    pooled = [
        pool([modules[n] for n in stack], PackedRows([sequences[n] for n in stack]))
        for stack in stacks
    ]
    if len(stacks) == len(groups) == 1:
        return [pooled[0].transpose(0, 1)]
    if len(stacks) == 1 and min(num_rows) == max(num_rows):
        parts = torch.split(pooled[0], [len(of_group) for of_group, _ in groups])
        return [part.transpose(0, 1) for part in parts]
    vectors = {
        n: each[: num_rows[n]]
        for stack, of_stack in zip(stacks, pooled, strict=True)
        for n, each in zip(stack, of_stack.unbind(), strict=True)
    }
    numbers = iter(range(len(modules)))
    return [
        torch.stack([vectors[next(numbers)] for _ in of_group], dim=1) for of_group, _ in groups
    ]


def _stacks(sizes: Sequence[int], num_rows: int) -> list[list[int]]:
    """Divide features into groups to pad together. Return the feature indices of each group."""
    stacks: list[list[int]] = []
    padding = 0
    for n in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        padding += sizes[stacks[-1][0]] - sizes[n] if stacks else 0
        if not stacks or padding > _MOST_PADDING or (len(stacks[-1]) + 1) * num_rows > _MOST_ROWS:
            stacks.append([])
            padding = 0
        stacks[-1].append(n)
    return [sorted(stack) for stack in stacks]


class PackedRows:
    """Rows of F features, each with R rows and at most M values.

    Values are either packed, ``[num_values, ...]``, or padded per feature, ``[F, M, ...]``.
    """

    def __init__(self, sequences: Sequence[JaggedTensor]) -> None:
        self.sizes = [sequence.values().shape[0] for sequence in sequences]
        self.num_rows = max(sequence.lengths().numel() for sequence in sequences)
        self.longest = max(jagged.longest_row(sequence) for sequence in sequences)
        lengths = _padded([sequence.lengths() for sequence in sequences], self.num_rows)
        self.filled = (lengths > 0).view(len(sequences), self.num_rows, 1)
        self.offsets: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        self._sequences = sequences

    def values(self) -> Tensor:
        """Return the padded values of the sequences, ``[F, M, D]``."""
        values = _padded([each.values() for each in self._sequences], max(self.sizes))
        return values.view(len(self.sizes), max(self.sizes), values.shape[1])

    def packed(self, values: Tensor) -> Tensor:
        """Convert padded values ``[F, M, ...]`` to packed values ``[num_values, ...]``."""
        if min(self.sizes) == max(self.sizes):
            return values.flatten(0, 1)
        packed: Tensor
        packed, _ = torch.ops.fbgemm.dense_to_jagged(values, [self._borders], sum(self.sizes))
        return packed

    def padded(self, values: Tensor) -> Tensor:
        """Convert packed values ``[num_values, ...]`` to zero-padded values ``[F, M, ...]``."""
        if min(self.sizes) == max(self.sizes):
            return values.view(len(self.sizes), max(self.sizes), *values.shape[1:])
        padded: Tensor = torch.ops.fbgemm.jagged_to_padded_dense(
            values, [self._borders], [max(self.sizes)], 0.0
        )
        return padded

    @cached_property
    def _cu_seqlens(self) -> Tensor:
        return self.offsets.int()

    @cached_property
    def _borders(self) -> Tensor:
        """Offset of each feature's first packed value, then the number of values, ``[F + 1]``."""
        return self.offsets[:: self.num_rows].contiguous()

    def self_attention(self, query_key_value: Tensor, heads: int) -> Tensor:
        """Compute multi-head self-attention within each row.

        Maps queries, keys and values side by side, ``[num_values, 3 * D]``, to ``[num_values, D]``.
        """
        dim = query_key_value.shape[1] // 3
        if not self.longest:
            return query_key_value[:, :dim]
        places = query_key_value.view(-1, 3, heads, dim // heads)
        borders = self._cu_seqlens, self.longest
        scale = (dim // heads) ** -0.5
        query, key, value = aligned(places).unbind(1)
        attended = attention(query, key, value, borders, borders, scale)
        return attended[..., : dim // heads].flatten(1)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean of packed values ``[num_values, D]`` in each row, ``[F, R, D]``."""
        if not values.shape[0]:  # the sum keeps the gradient
            return values.sum(0).expand(len(self.sizes), self.num_rows, -1)
        means = torch.segment_reduce(values, "mean", offsets=self.offsets, unsafe=True, initial=0)
        return means.view(len(self.sizes), self.num_rows, -1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_borders: tuple[Tensor, int],
    key_borders: tuple[Tensor, int],
    scale: float,
) -> Tensor:
    """Compute attention from the queries to the keys of the same row.

    Args:
        query: packed, ``[num_queries, heads, size]``, with an ``aligned`` size.
        key: packed, ``[num_values, heads, size]``.
        value: like ``key``.
        query_borders: row offsets of queries, ``[R + 1]``, and an upper bound on queries per row.
        key_borders: row offsets of keys, ``[R + 1]``, and an upper bound on keys per row.
        scale: factor of the scores.

    Returns:
        ``[num_queries, heads, size]``. Undefined for queries without keys.
    """
    attended: Tensor = torch.ops.aten._efficient_attention_forward(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,  # bias
        query_borders[0].int(),
        key_borders[0].int(),
        query_borders[1],
        key_borders[1],
        0.0,  # dropout
        0,  # no mask
        True,  # for the gradient
        scale=scale,
    )[0]
    return attended.flatten(0, 1)


def aligned(heads: Tensor) -> Tensor:
    """Zero-pad the last dimension to a multiple of 16 bytes, the kernel's load size."""
    missing = -heads.shape[-1] % (16 // heads.element_size())
    return F.pad(heads, (0, missing)) if missing else heads


class _Padded(torch.autograd.Function):
    """Concatenates parts ``[n, ...]``, each padded with zeros to ``size`` values."""

    @staticmethod
    def forward(ctx: Any, size: int, *parts: Tensor) -> Tensor:
        missing = [size - part.shape[0] for part in parts]
        ctx.sizes = [part.shape[0] for part in parts]
        ctx.missing = missing
        if not any(missing):
            return torch.cat(parts)
        zeros = torch.split(parts[0].new_zeros(sum(missing), *parts[0].shape[1:]), missing)
        return torch.cat([each for pair in zip(parts, zeros, strict=True) for each in pair])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [size for pair in zip(ctx.sizes, ctx.missing, strict=True) for size in pair]
        return (None, *torch.split(gradient, sizes)[::2])


def _padded(parts: Sequence[Tensor], size: int) -> Tensor:
    padded: Tensor = _Padded.apply(size, *parts)  # type: ignore[no-untyped-call]
    return padded


class _Linear(torch.autograd.Function):
    """Applies one linear layer per feature. Gradients have the layout of the parameters."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, values: Tensor, parameters: list[Tensor], *_: Tensor) -> Tensor:
        weight = torch.stack(parameters[: len(values)])
        bias = torch.stack(parameters[len(values) :])
        ctx.save_for_backward(values, weight)
        ctx.parameters = parameters
        return torch.baddbmm(bias.unsqueeze(1), values, weight.transpose(1, 2))

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        of_weight = torch.bmm(gradient.transpose(1, 2), values)
        gradients = *of_weight.unbind(), *gradient.sum(1).unbind()
        if len(ctx.needs_input_grad) == 2:
            stored_gradients.store(ctx.parameters, gradients)
            gradients = ()
        return torch.bmm(gradient, weight), None, *gradients


def linear(layers: Sequence[nn.Linear], values: Tensor) -> Tensor:
    """Apply one linear layer per feature to values ``[F, n, in_features]``."""
    parameters = [*(layer.weight for layer in layers), *(layer.bias for layer in layers)]
    edges = () if stored_gradients.allowed(parameters, [values]) else parameters
    outputs: Tensor = _Linear.apply(values, parameters, *edges)  # type: ignore[no-untyped-call]
    return outputs


class _Stacked(torch.autograd.Function):
    """``torch.stack``, whose backward pass splits the gradient in one call."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:  # noqa: ARG004
        return torch.stack(parameters)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return gradient.unbind()


def layer_norm(norms: Sequence[nn.LayerNorm], values: Tensor) -> Tensor:
    """Apply one layer normalization per feature to values ``[F, n, D]``."""
    weight = _Stacked.apply(*(norm.weight for norm in norms)).unsqueeze(1)  # type: ignore[no-untyped-call]
    bias = _Stacked.apply(*(norm.bias for norm in norms)).unsqueeze(1)  # type: ignore[no-untyped-call]
    normal: Tensor = F.layer_norm(values, values.shape[-1:], eps=norms[0].eps) * weight + bias
    return normal
