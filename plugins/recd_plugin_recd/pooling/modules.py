"""Pooling modules: sum, mean and max, self-attention, and a transformer encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.packed import (
    PackedRows,
    can_pack,
    layer_norm,
    linear,
    pool_packed,
)
from recd_plugin_recd.pooling.rows import JaggedRows, attention_rows, pool_bags


class Reduction(nn.Module):
    """Reduces embeddings ``[num_values, D]`` of R rows to ``[R, D]`` by sum, mean or max."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, sequences: JaggedTensor) -> Tensor:
        return reduce_rows([sequences], self.mode)[:, 0]


def reduce_rows(sequences: Sequence[JaggedTensor], mode: str) -> Tensor:
    """Reduce the rows of several features by ``sum``, ``mean`` or ``max``.

    Args:
        sequences: embeddings ``[num_values, D]`` of R rows, for each feature.
        mode: ``sum``, ``mean`` or ``max``.

    Returns:
        ``[R, num_features, D]``.
    """
    values = torch.cat([sequence.values() for sequence in sequences])
    lengths = torch.cat([sequence.lengths() for sequence in sequences])
    pooled = pool_bags(values, lengths, mode)
    return pooled.view(len(sequences), -1, pooled.shape[1]).transpose(0, 1)


class SelfAttention(nn.Module):
    """Multi-head self-attention within each row, followed by the mean of its outputs.

    The output projection is linear, so it is applied after the mean, to R rows instead of all
    values.
    """

    def __init__(self, embedding_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_projection = nn.Linear(embedding_dim, 3 * embedding_dim)
        self.out_projection = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, sequences: JaggedTensor) -> Tensor:
        """Pool the embeddings ``[num_values, D]`` of R rows to ``[R, D]``."""
        return pool_groups([([self], [sequences])])[0][:, 0]


def pool_by_attention(
    modules: Sequence[SelfAttention], sequences: Sequence[JaggedTensor]
) -> list[Tensor]:
    """Pool several features with one attention call. Returns one ``[R, D]`` per feature."""
    rows = attention_rows(sequences)
    projected = [
        module.in_projection(sequence.values())
        for module, sequence in zip(modules, sequences, strict=True)
    ]
    attended = rows.self_attention(torch.cat(projected), modules[0].heads)
    means = torch.split(pool_bags(attended, rows.lengths, "mean"), rows.num_rows)
    pooled = [module.out_projection(mean) for module, mean in zip(modules, means, strict=True)]
    return rows.zero_where_empty(pooled)


Norm = Literal["pre", "post"]


class EncoderLayer(nn.Module):
    """Encoder layer like ``torch.nn.TransformerEncoderLayer``, with ReLU, without dropout."""

    def __init__(self, dim: int, feed_forward: int) -> None:
        super().__init__()
        self.in_projection = nn.Linear(dim, 3 * dim)
        self.out_projection = nn.Linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, feed_forward)
        self.contract = nn.Linear(feed_forward, dim)

    def hidden(self, values: Tensor) -> Tensor:
        """Return the input of the second linear layer of the feed-forward network."""
        return self.expand(values).relu_()


class Transformer(nn.Module):
    """A transformer encoder without position encoding, followed by the mean of each row."""

    def __init__(
        self, embedding_dim: int, layers: int, heads: int, feed_forward: int, norm: Norm
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm = norm
        self.layers = nn.ModuleList(
            EncoderLayer(embedding_dim, feed_forward) for _ in range(layers)
        )

    def forward(self, sequences: JaggedTensor) -> Tensor:
        """Pool the embeddings ``[num_values, D]`` of R rows to ``[R, D]``."""
        return pool_groups([([self], [sequences])])[0][:, 0]


def pool_by_transformer(
    modules: Sequence[Transformer], sequences: Sequence[JaggedTensor]
) -> list[Tensor]:
    """Pool several features with one attention call per layer. Returns ``[R, D]`` for each."""
    rows = attention_rows(sequences)
    heads, pre = modules[0].heads, modules[0].norm == "pre"
    values = [sequence.values() for sequence in sequences]
    stacks = list(zip(*(module.layers for module in modules), strict=True))
    for layers in stacks[:-1]:
        values = _layer(layers, values, rows, heads, pre)
    pooled = _last_layer_means(stacks[-1], values, rows, heads, pre)
    return rows.zero_where_empty(pooled)


def encode(
    stacks: Sequence[Sequence[EncoderLayer]], sequences: Sequence[JaggedTensor], heads: int
) -> list[Tensor]:
    """Encode the values of several features with layers (pre-norm) of one module per feature.

    Args:
        stacks: the modules of each layer.
        sequences: embeddings ``[num_values, D]`` of R rows, for each feature.
        heads: number of attention heads.

    Returns:
        ``[num_values, D]`` for each feature.
    """
    rows = attention_rows(sequences)
    values = [sequence.values() for sequence in sequences]
    for layers in stacks:
        values = _layer(layers, values, rows, heads, pre=True)
    return values


def _attended(
    layers: Sequence[EncoderLayer], values: list[Tensor], rows: JaggedRows, heads: int, pre: bool
) -> list[Tensor]:
    """Apply the attention sublayer of one layer to the values of all features."""
    projected = [
        layer.in_projection(layer.attention_norm(each) if pre else each)
        for layer, each in zip(layers, values, strict=True)
    ]
    attended = torch.split(rows.self_attention(torch.cat(projected), heads), rows.num_values)
    sums = [
        each + layer.out_projection(part)
        for layer, each, part in zip(layers, values, attended, strict=True)
    ]
    if pre:
        return sums
    return [layer.attention_norm(each) for layer, each in zip(layers, sums, strict=True)]


def _layer(
    layers: Sequence[EncoderLayer], values: list[Tensor], rows: JaggedRows, heads: int, pre: bool
) -> list[Tensor]:
    attended = _attended(layers, values, rows, heads, pre)
    outputs = []
    for layer, each in zip(layers, attended, strict=True):
        if pre:
            outputs.append(each + layer.contract(layer.hidden(layer.feed_forward_norm(each))))
        else:
            outputs.append(layer.feed_forward_norm(each + layer.contract(layer.hidden(each))))
    return outputs


def _last_layer_means(
    layers: Sequence[EncoderLayer], values: list[Tensor], rows: JaggedRows, heads: int, pre: bool
) -> list[Tensor]:
    """Apply the last layer and return the mean of each row, ``[R, D]`` for each feature.

    With pre-norm, the last linear layer is applied after the mean, to rows instead of values.
    """
    lengths = torch.split(rows.lengths, rows.num_rows)
    if not pre:
        outputs = _layer(layers, values, rows, heads, pre)
        return [pool_bags(*pair, "mean") for pair in zip(outputs, lengths, strict=True)]
    attended = _attended(layers, values, rows, heads, pre)
    return [
        pool_bags(each, of_rows, "mean")
        + layer.contract(pool_bags(layer.hidden(layer.feed_forward_norm(each)), of_rows, "mean"))
        for layer, each, of_rows in zip(layers, attended, lengths, strict=True)
    ]


def _packed_attention(modules: Sequence[SelfAttention], rows: PackedRows) -> Tensor:
    """Do the same as ``pool_by_attention`` on CUDA. Returns ``[F, R, D]``."""
    projected = linear([module.in_projection for module in modules], rows.values())
    attended = rows.self_attention(rows.packed(projected), modules[0].heads)
    means = rows.means(attended)
    return linear([module.out_projection for module in modules], means) * rows.filled


def _packed_transformer(modules: Sequence[Transformer], rows: PackedRows) -> Tensor:
    """Do the same as ``pool_by_transformer`` on CUDA. Returns ``[F, R, D]``."""
    heads, pre = modules[0].heads, modules[0].norm == "pre"
    values = rows.values()
    stacks: list[Any] = list(zip(*(module.layers for module in modules), strict=True))
    for layers in stacks:
        attention_norms = [layer.attention_norm for layer in layers]
        feed_forward_norms = [layer.feed_forward_norm for layer in layers]
        expand, contract = [x.expand for x in layers], [x.contract for x in layers]
        normal = layer_norm(attention_norms, values) if pre else values
        projected = linear([layer.in_projection for layer in layers], normal)
        attended = rows.padded(rows.self_attention(rows.packed(projected), heads))
        values = values + linear([layer.out_projection for layer in layers], attended)
        normal = layer_norm(feed_forward_norms if pre else attention_norms, values)
        hidden = linear(expand, normal).relu_()
        if pre and layers is stacks[-1]:
            # The last linear layer is applied after the mean, to rows instead of values.
            means = rows.means(rows.packed(torch.cat([values, hidden], dim=2)))
            values, hidden = torch.split(means, [values.shape[2], hidden.shape[2]], 2)
            return (values + linear(contract, hidden)) * rows.filled
        values = (values if pre else normal) + linear(contract, hidden)
        if not pre:
            values = layer_norm(feed_forward_norms, values)
    return rows.means(rows.packed(values)) * rows.filled


def pool_groups(
    groups: Sequence[tuple[Sequence[Any], Sequence[JaggedTensor]]],
) -> list[Tensor]:
    """Pool the features of all groups in one call. Returns ``[R, num_features, D]`` per group."""
    modules = [module for of_group, _ in groups for module in of_group]
    sequences = [sequence for _, of_group in groups for sequence in of_group]
    attends = isinstance(modules[0], SelfAttention)
    if can_pack(sequences):
        return pool_packed(_packed_attention if attends else _packed_transformer, groups)
    pool: Any = pool_by_attention if attends else pool_by_transformer
    vectors = iter(pool(modules, sequences))
    return [torch.stack([next(vectors) for _ in of_group], dim=1) for of_group, _ in groups]
