"""Target attention: one query per batch row, and deduplicated sequences as keys and values.

B batch rows, each with one target item, share U unique sequences. The targets of each sequence are
divided into blocks of ceil(B / U) targets, and the last block of a sequence is padded. A block
stores its sequence only once, so there are at most 2 * U sequences instead of B. Padding increases
the number of targets to at most 2 * B.

The values of sequences are not projected. The key projection is applied to the query instead,
``(W_q t) (W_k x) = (W_k^T W_q t) x``, and the value projection to the weighted sum. The results are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.packed import PackedRows, aligned, attention, can_pack, linear
from recd_plugin_recd.pooling.rows import JaggedRows, TracedRows, is_traced
from recd_plugins.api import jagged, jagged_index_select

Weights = Literal["softmax", "sigmoid"]


class TargetAttention(nn.Module):
    """Multi-head attention with a target as query, and a sequence as keys and values.

    Attention weights are the softmax or the sigmoid of the scores, according to ``weights``.
    """

    def __init__(self, embedding_dim: int, heads: int, weights: Weights) -> None:
        super().__init__()
        self.heads = heads
        self.weights = weights
        self.query_projection = nn.Linear(embedding_dim, embedding_dim)
        # A key bias would add the same constant to all scores of a query.
        self.key_projection = nn.Linear(embedding_dim, embedding_dim, bias=False)
        self.value_projection = nn.Linear(embedding_dim, embedding_dim)
        self.out_projection = nn.Linear(embedding_dim, embedding_dim)

    @staticmethod
    def pool(
        modules: Sequence[TargetAttention],
        sequences: Sequence[JaggedTensor],
        targets: Tensor,
        inverse: Tensor | None,
    ) -> Tensor:
        """Pool several features, with a module for each. See ``TargetPooling.pool_for``."""
        first = modules[0]
        if first.weights == "softmax" and can_pack(sequences):
            return _pool_packed(modules, sequences, targets, inverse)
        filled = torch.stack([sequence.lengths() > 0 for sequence in sequences], dim=1)
        queries = [module.queries(targets) for module in modules]
        blocks = None
        traced = is_traced()
        if inverse is not None:
            filled = filled.index_select(0, inverse)
        if inverse is not None and not traced:
            blocks = blocks_of(inverse, num_rows=sequences[0].lengths().numel())
            sequences = [jagged_index_select(each, blocks.rows) for each in sequences]
            queries = [blocks.gather(each) for each in queries]
        dim = targets.shape[1]
        rows = TracedRows(sequences, inverse) if traced else JaggedRows(sequences)
        attend = _softmax_sums if first.weights == "softmax" else _sigmoid_sums
        sums = rows.weighted_sums(
            torch.cat(queries),
            torch.cat([sequence.values() for sequence in sequences]),
            partial(attend, scale=(dim // first.heads) ** -0.5),
        )
        pooled = []
        for module, each in zip(modules, torch.split(sums, rows.num_rows), strict=True):
            of_targets = each if blocks is None else blocks.scatter(each, first.heads)
            pooled.append(module.outputs(of_targets))
        return torch.stack(pooled, dim=1) * filled.unsqueeze(2)

    def forward(
        self, sequences: JaggedTensor, targets: Tensor, inverse: Tensor | None = None
    ) -> Tensor:
        """Pool the sequence of each target to ``[B, D]``. See ``pool``."""
        return self.pool([self], [sequences], targets, inverse)[:, 0]

    def queries(self, targets: Tensor) -> Tensor:
        """Return ``W_k^T (W_q t + b_q)`` of each target and head, ``[B, heads, D]``."""
        queries = self.query_projection(targets).view(
            -1, self.heads, targets.shape[1] // self.heads
        )
        keys = self.key_projection.weight.view(self.heads, -1, targets.shape[1])
        return torch.einsum("bhd,hde->bhe", queries, keys)

    def outputs(self, sums: Tensor) -> Tensor:
        """Apply the value and output projections to weighted sums ``[B, heads, D]``: ``[B, D]``."""
        weights = self.value_projection.weight.view(self.heads, -1, sums.shape[2])
        values = torch.einsum("bhe,hde->bhd", sums, weights).flatten(1)
        vectors: Tensor = self.out_projection(values + self.value_projection.bias)
        return vectors


def _pool_packed(
    modules: Sequence[TargetAttention],
    sequences: Sequence[JaggedTensor],
    targets: Tensor,
    inverse: Tensor | None,
) -> Tensor:
    """Do the same as ``TargetAttention.pool`` on CUDA, with targets sorted by their sequence."""
    rows = PackedRows(sequences)
    heads, (batch_size, dim) = modules[0].heads, targets.shape
    every_row = torch.arange(rows.num_rows + 1, device=targets.device)
    of_target, borders, most = every_row[:-1], every_row, 1
    if inverse is not None:
        of_target, order = inverse.sort(stable=True)
        targets = targets.index_select(0, order)
        borders = torch.searchsorted(of_target, every_row)
        most = int(borders.diff().max()) if batch_size else 0
    filled = rows.filled.index_select(1, of_target)
    queries = linear(
        [module.query_projection for module in modules], targets.expand(len(modules), -1, -1)
    )
    keys = torch.stack([module.key_projection.weight for module in modules])
    by_head = len(modules), heads, dim // heads, dim
    queries = queries.view(len(modules), -1, *by_head[1:3])
    queries = torch.einsum("fbhd,fhde->fbhe", queries, keys.view(by_head))
    values = torch.cat([sequence.values() for sequence in sequences])
    if most and rows.longest:
        starts = torch.arange(len(modules), device=targets.device).unsqueeze(1) * batch_size
        borders = F.pad((starts + borders[:-1]).flatten(), (0, 1), value=len(filled) * batch_size)
        # The kernel leaves attention to empty sequences undefined, and its gradients.
        asked = torch.where(filled.unsqueeze(3), queries, 0).reshape(-1, 1, dim)
        known = aligned(values.unsqueeze(1))
        of_queries, of_values = (borders * heads, most * heads), (rows.offsets, rows.longest)
        scale = (dim // heads) ** -0.5
        sums = attention(aligned(asked), known, known, of_queries, of_values, scale)
        sums = sums[..., :dim].reshape(queries.shape)
    else:
        sums = queries + values.sum()
    weights = torch.stack([module.value_projection.weight for module in modules])
    biases = torch.stack([module.value_projection.bias for module in modules])
    vectors = torch.einsum("fbhe,fhde->fbhd", sums, weights.view(by_head)).flatten(2)
    vectors = linear([module.out_projection for module in modules], vectors + biases.unsqueeze(1))
    pooled = torch.where(filled, vectors, 0)
    if inverse is not None:
        pooled = torch.empty_like(pooled).index_copy(1, order, pooled)
    return pooled.transpose(0, 1)


def _softmax_sums(queries: Tensor, values: Tensor, valid: Tensor | None, *, scale: float) -> Tensor:
    mask = None if valid is None else valid.unsqueeze(1)
    keys = values.unsqueeze(1)
    sums = F.scaled_dot_product_attention(
        queries.unsqueeze(1), keys, keys, attn_mask=mask, scale=scale
    )
    return sums.squeeze(1)


def _sigmoid_sums(queries: Tensor, values: Tensor, valid: Tensor | None, *, scale: float) -> Tensor:
    weights = torch.bmm(queries * scale, values.transpose(1, 2)).sigmoid()
    if valid is not None:
        weights = weights * valid
    return torch.bmm(weights, values)


@dataclass(frozen=True)
class Blocks:
    """Batch rows, grouped into blocks of rows with the same unique row.

    Attributes:
        rows: the unique row of each block, int64 ``[num_blocks]``.
        width: number of slots per block. Unused slots are padding.
        places: the slot of each batch row, int64 ``[B]``, below ``num_blocks * width``.
        one_per_row: whether block i is the only block of unique row i.
    """

    rows: Tensor
    width: int
    places: Tensor
    one_per_row: bool

    def gather(self, vectors: Tensor) -> Tensor:
        """Copy ``[B, heads, D]`` to blocks ``[num_blocks, width * heads, D]``, zero-padded."""
        num_blocks, (_, heads, dim) = self.rows.numel(), vectors.shape
        placed = vectors.new_zeros(num_blocks * self.width, heads, dim)
        placed = placed.index_copy(0, self.places, vectors)
        return placed.view(num_blocks, self.width * heads, dim)

    def scatter(self, vectors: Tensor, heads: int) -> Tensor:
        """Undo ``gather``. Returns ``[B, heads, D]``."""
        placed = vectors.reshape(self.rows.numel() * self.width, heads * vectors.shape[2])
        return placed.index_select(0, self.places).view(-1, heads, vectors.shape[2])


def blocks_of(inverse: Tensor, num_rows: int) -> Blocks:
    """Group the batch rows of each unique row into blocks. At most half of the slots are padding.

    ``inverse``, int64 ``[B]``, has the unique row of each batch row.
    """
    ordered, order = inverse.sort(stable=True)
    counts = torch.bincount(inverse, minlength=num_rows)
    width = -(-inverse.numel() // max(num_rows, 1))
    most = int(counts.max()) if num_rows else 0
    if num_rows * most <= 2 * inverse.numel():
        width = most  # one block per unique row, so that no sequence is copied
    num_blocks = (counts + width - 1) // max(width, 1)
    nth = torch.arange(inverse.numel(), device=inverse.device) - jagged.offsets_of(counts)[ordered]
    places = torch.empty_like(inverse)
    places[order] = jagged.offsets_of(num_blocks)[ordered] * width + nth
    rows = torch.repeat_interleave(num_blocks)
    return Blocks(rows, width, places, bool((num_blocks == 1).all()))
