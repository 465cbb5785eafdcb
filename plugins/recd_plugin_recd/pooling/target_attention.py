"""Stacked target attention: candidates attend in several layers to the history of their request.

Keys and values are projected once per layer and unique history. The candidates of a unique history
form one block of queries, as in ``din_modules``. So memory grows with the number of stored values
plus the number of rows, not with their product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.din_modules import TargetAttention, blocks_of
from recd_plugin_recd.pooling.modules import EncoderLayer, encode
from recd_plugin_recd.pooling.packed import PackedRows, aligned, attention, can_pack
from recd_plugin_recd.pooling.rows import JaggedRows, TracedRows, is_traced
from recd_plugins.api import jagged

#: Maps a layer's modules and queries (``[B, D]`` per feature) to outputs of the same shapes.
Attend = Callable[[Sequence[TargetAttention], Sequence[Tensor]], list[Tensor]]


class StackedTargetAttention(nn.Module):
    """Layers of multi-head attention from a target to a sequence.

    All layers except the last one add their output to the query and apply layer normalization.
    With ``layers=1`` and defaults for later arguments, it equals softmax ``TargetAttention``.

    Args:
        embedding_dim: dimension D of targets and sequences.
        heads: number of attention heads.
        layers: number of attention layers.
        feed_forward: hidden size of a feed-forward network after each layer; None for none.
        positions: number of learned position vectors, counted from the end of a sequence; None for
            no position encoding. Items further away share the vector of the furthest position.
        encoder_layers: number of transformer layers that encode the sequences of unique rows.
    """

    def __init__(
        self,
        embedding_dim: int,
        heads: int,
        layers: int,
        feed_forward: int | None = None,
        positions: int | None = None,
        encoder_layers: int = 0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            TargetAttention(embedding_dim, heads, "softmax") for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(embedding_dim) for _ in range(layers - 1))
        self.feed_forwards = nn.ModuleList()
        if feed_forward is not None:
            self.feed_forwards.extend(
                _feed_forward(embedding_dim, feed_forward) for _ in range(layers)
            )
        shape = (positions or 0), embedding_dim
        self.positions = nn.Parameter(0.02 * torch.randn(shape)) if positions else None
        self.encoder = nn.ModuleList(
            EncoderLayer(embedding_dim, 4 * embedding_dim) for _ in range(encoder_layers)
        )

    @staticmethod
    def pool(
        modules: Sequence[StackedTargetAttention],
        sequences: Sequence[JaggedTensor],
        targets: Tensor,
        inverse: Tensor | None,
    ) -> Tensor:
        """Pool several features, with a module for each. See ``TargetPooling.pool_for``."""
        rows = [
            module.with_positions(each) for module, each in zip(modules, sequences, strict=True)
        ]
        if encoders := list(zip(*(module.encoder for module in modules), strict=True)):
            encoded = zip(encode(encoders, rows, modules[0].heads), sequences, strict=True)
            rows = [JaggedTensor(each, lengths=sequence.lengths()) for each, sequence in encoded]
        attend: Attend
        if can_pack(sequences):
            attend, targets, order = _packed(sequences, rows, targets, inverse)
        else:
            attend, order = _blocked(rows, inverse), None
        vectors = [targets] * len(modules)
        stacks: list[Any] = list(zip(*(module.layers for module in modules), strict=True))
        for number, layers in enumerate(stacks):
            attended = zip(modules, vectors, attend(layers, vectors), strict=True)
            vectors = [module.layer_output(number, *each) for module, *each in attended]
        pooled = torch.stack(vectors, dim=1)
        if order is not None:
            pooled = torch.empty_like(pooled).index_copy(0, order, pooled)
        filled = torch.stack([sequence.lengths() > 0 for sequence in sequences], dim=1)
        if inverse is not None:
            filled = filled.index_select(0, inverse)
        return torch.where(filled.unsqueeze(2), pooled, 0)

    def forward(
        self, sequences: JaggedTensor, targets: Tensor, inverse: Tensor | None = None
    ) -> Tensor:
        """Pool the sequence of each target to ``[B, D]``. See ``pool``."""
        return self.pool([self], [sequences], targets, inverse)[:, 0]

    def layer_output(self, number: int, queries: Tensor, attended: Tensor) -> Tensor:
        """Return the output ``[B, D]`` of a layer from its queries and their attention."""
        if number < len(self.norms):
            attended = self.norms[number](queries + attended)
        if self.feed_forwards:
            attended = attended + self.feed_forwards[number](attended)
        return attended

    def with_positions(self, sequences: JaggedTensor) -> JaggedTensor:
        """Add to each value the vector of its position, counted from the end of its sequence."""
        if self.positions is None:
            return sequences
        values, lengths = sequences.values(), sequences.lengths().long()
        ends = lengths.cumsum(0).repeat_interleave(lengths, output_size=values.shape[0])
        from_end = ends - 1 - torch.arange(values.shape[0], device=values.device)
        values = values + self.positions[from_end.clamp(max=self.positions.shape[0] - 1)]
        return JaggedTensor(values, lengths=sequences.lengths())


def _feed_forward(dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)
    )


def _keys_and_values(module: TargetAttention, values: Tensor) -> Tensor:
    """Project the values of unique rows to keys and values, ``[num_values, 2 * D]``."""
    key, value = module.key_projection, module.value_projection
    bias = torch.cat([torch.zeros_like(value.bias), value.bias])
    return F.linear(values, torch.cat([key.weight, value.weight]), bias)


def _blocked(rows: Sequence[JaggedTensor], inverse: Tensor | None) -> Attend:
    """Return an ``Attend`` function that groups the queries of each unique row into blocks."""
    traced = is_traced()
    blocks = None
    index: list[Tensor | None] = [None] * len(rows)
    lengths = [each.lengths() for each in rows]
    if inverse is not None and not traced:
        blocks = blocks_of(inverse, num_rows=lengths[0].numel())
        if not blocks.one_per_row:
            found = [jagged.positions_of_rows(each.offsets(), blocks.rows) for each in rows]
            index = [positions for positions, _ in found]
            lengths = [each for _, each in found]
    measured = [
        JaggedTensor(each.values() if at is None else at.unsqueeze(1), lengths=of_rows)
        for each, at, of_rows in zip(rows, index, lengths, strict=True)
    ]
    jagged_rows = TracedRows(measured, inverse) if traced else JaggedRows(measured)

    def attend(modules: Sequence[TargetAttention], queries: Sequence[Tensor]) -> list[Tensor]:
        projected = [
            _keys_and_values(module, each.values())
            for module, each in zip(modules, rows, strict=True)
        ]
        known = [
            each if at is None else each.index_select(0, at)
            for each, at in zip(projected, index, strict=True)
        ]
        asked = [
            module.query_projection(each).unsqueeze(1)
            for module, each in zip(modules, queries, strict=True)
        ]
        if blocks is not None:
            asked = [blocks.gather(each) for each in asked]
        sums = jagged_rows.weighted_sums(
            torch.cat(asked), torch.cat(known), partial(_multi_head, heads=modules[0].heads)
        )
        return [
            module.out_projection(
                each.flatten(1) if blocks is None else blocks.scatter(each, 1).flatten(1)
            )
            for module, each in zip(modules, torch.split(sums, jagged_rows.num_rows), strict=True)
        ]

    return attend


def _multi_head(queries: Tensor, known: Tensor, valid: Tensor | None, *, heads: int) -> Tensor:
    """Return the multi-head attention of queries ``[n, Q, D]``, as ``[n, Q, D]``.

    ``known`` holds keys and values side by side, ``[n, L, 2 * D]``. ``valid``, bool ``[n, 1, L]``,
    is False for padding. None means no padding.
    """
    num_rows, num_queries, dim = queries.shape
    query = queries.view(num_rows, num_queries, heads, -1).transpose(1, 2)
    parts = known.view(num_rows, known.shape[1], 2, heads, dim // heads)
    key, value = (each.transpose(1, 2) for each in parts.unbind(2))
    mask = None if valid is None else valid.unsqueeze(1)
    sums = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return sums.transpose(1, 2).reshape(num_rows, num_queries, dim)


def _packed(
    sequences: Sequence[JaggedTensor],
    rows: Sequence[JaggedTensor],
    targets: Tensor,
    inverse: Tensor | None,
) -> tuple[Attend, Tensor, Tensor | None]:
    """Do the same as ``_blocked`` on CUDA, without padding.

    Returns:
        The function, the targets sorted by sequence, and their indices; None without ``inverse``.
    """
    packed, order = PackedRows(sequences), None
    batch_size, num_features = targets.shape[0], len(rows)
    every_row = torch.arange(packed.num_rows + 1, device=targets.device)
    of_target, borders, most = every_row[:-1], every_row, 1
    if inverse is not None:
        of_target, order = inverse.sort(stable=True)
        targets = targets.index_select(0, order)
        borders = torch.searchsorted(of_target, every_row)
        most = int(borders.diff().max()) if batch_size else 0
    starts = torch.arange(num_features, device=targets.device).unsqueeze(1) * batch_size
    all_borders = F.pad((starts + borders[:-1]).flatten(), (0, 1), value=num_features * batch_size)

    def attend(modules: Sequence[TargetAttention], queries: Sequence[Tensor]) -> list[Tensor]:
        heads, size = modules[0].heads, targets.shape[1] // modules[0].heads
        projected = torch.cat(
            [
                _keys_and_values(module, each.values())
                for module, each in zip(modules, rows, strict=True)
            ]
        )
        asked = torch.cat(
            [module.query_projection(each) for module, each in zip(modules, queries, strict=True)]
        )
        if not most or not packed.longest:
            sums = asked + projected.sum()
        else:
            key, value = projected.view(-1, 2, heads, size).unbind(1)
            query = asked.view(-1, heads, size)
            of_queries, of_values = (all_borders, most), (packed.offsets, packed.longest)
            sums = attention(
                aligned(query), aligned(key), aligned(value), of_queries, of_values, size**-0.5
            )
            # The kernel leaves attention to empty sequences undefined.
            filled = packed.filled.index_select(1, of_target).flatten(0, 1)
            sums = torch.where(filled, sums[..., :size].flatten(1), 0)
        return [
            module.out_projection(each)
            for module, each in zip(modules, sums.view(num_features, batch_size, -1), strict=True)
        ]

    return attend, targets, order
