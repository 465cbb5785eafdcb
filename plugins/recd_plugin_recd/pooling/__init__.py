"""Pooling plugins, which reduce the embeddings of a sequence feature to one vector per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from recd_plugins.api import PluginOptions, Pooling, RecdError, TargetPooling

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor


class _SelfAttentionPooling(Pooling):
    """Base of the self-attention plugins, which pool several features in one call."""

    always_trained = True

    def pool(self, modules: Sequence[Any], sequences: Sequence[JaggedTensor]) -> Tensor:
        return self.pool_groups([(modules, sequences)])[0]

    def pool_groups(
        self, groups: Sequence[tuple[Sequence[Any], Sequence[JaggedTensor]]]
    ) -> list[Tensor]:
        from recd_plugin_recd.pooling.modules import pool_groups

        return pool_groups(groups)


class AttentionPooling(_SelfAttentionPooling):
    """Pools a sequence by multi-head self-attention, followed by the mean of its outputs."""

    name = "recd.attention"

    class Options(PluginOptions):
        heads: int = Field(
            default=2, gt=0, description="Number of attention heads. Must divide embedding_dim."
        )

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.modules import SelfAttention

        _check_heads(self.name, self.options.heads, embedding_dim)
        return SelfAttention(embedding_dim, self.options.heads)


def _check_heads(plugin: str, heads: int, embedding_dim: int) -> None:
    if embedding_dim % heads:
        raise RecdError(
            f"{plugin}: option 'heads' is {heads}, which does not divide the model's embedding_dim "
            f"({embedding_dim}). Change one of the two values."
        )


class _TargetAttentionPooling(TargetPooling):
    """Base of the target attention plugins, which pool several features in one call."""

    always_trained = True

    class Options(PluginOptions):
        target: str = Field(
            min_length=1, description="Feature of the target item, whose vector is the query."
        )

    options: Options

    @property
    def target(self) -> str:
        return self.options.target

    def pool_for(
        self,
        modules: Sequence[Any],
        sequences: Sequence[JaggedTensor],
        targets: Tensor,
        inverse: Tensor | None,
    ) -> Tensor:
        pooled: Tensor = modules[0].pool(modules, sequences, targets, inverse)
        return pooled


class DinPooling(_TargetAttentionPooling):
    """Pools a sequence by attention. The query is the vector of the target item.

    As in Deep Interest Network (arXiv 1706.06978), but scores are scaled dot products.
    """

    name = "recd.din"

    class Options(_TargetAttentionPooling.Options):
        weights: Literal["softmax", "sigmoid"] = Field(
            default="softmax",
            description="Attention weights. softmax: the weights of a sequence sum to 1. sigmoid: "
            "weights are independent, so more matching items give a larger result.",
        )
        heads: int = Field(
            default=1, gt=0, description="Number of attention heads. Must divide embedding_dim."
        )

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.din_modules import TargetAttention

        _check_heads(self.name, self.options.heads, embedding_dim)
        return TargetAttention(embedding_dim, self.options.heads, self.options.weights)


class TargetAttentionPooling(_TargetAttentionPooling):
    """Pools a sequence by layers of attention with the target item as query.

    This is stacked cross-attention with one query, as in STCA (arXiv 2511.06077). Each layer
    projects keys and values once per unique row. With ``layers: 1`` and other options at their
    defaults, it equals ``recd.din`` with ``heads: 2``.
    """

    name = "recd.target_attention"

    class Options(_TargetAttentionPooling.Options):
        layers: int = Field(default=2, gt=0, description="Number of attention layers.")
        heads: int = Field(
            default=2, gt=0, description="Number of attention heads. Must divide embedding_dim."
        )
        feed_forward: int | None = Field(
            default=None,
            gt=0,
            description="Hidden size of a feed-forward network after each layer; null for none.",
        )
        positions: int | None = Field(
            default=None,
            gt=0,
            description="Number of learned position vectors, counted from the end of the sequence; "
            "null for none.",
        )
        encoder_layers: int = Field(
            default=0,
            ge=0,
            description="Number of transformer layers that encode each unique sequence first.",
        )

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.target_attention import StackedTargetAttention

        _check_heads(self.name, self.options.heads, embedding_dim)
        return StackedTargetAttention(embedding_dim, **self.options.model_dump(exclude={"target"}))


class TransformerPooling(_SelfAttentionPooling):
    """Pools a sequence by a transformer encoder, followed by the mean of its outputs."""

    name = "recd.transformer"

    class Options(PluginOptions):
        layers: int = Field(default=1, gt=0, description="Number of encoder layers.")
        heads: int = Field(
            default=2, gt=0, description="Number of attention heads. Must divide embedding_dim."
        )
        feed_forward: int | None = Field(
            default=None,
            gt=0,
            description="Hidden size of the feed-forward network; null means 4 * embedding_dim.",
        )
        norm: Literal["pre", "post"] = Field(
            default="pre",
            description="Layer normalization is before (pre) or after (post) each sublayer.",
        )

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.modules import Transformer

        options = self.options
        _check_heads(self.name, options.heads, embedding_dim)
        feed_forward = options.feed_forward or 4 * embedding_dim
        return Transformer(embedding_dim, options.layers, options.heads, feed_forward, options.norm)


class _Reduction(Pooling):
    always_trained = True
    mode: ClassVar[str]

    def build(self, embedding_dim: int) -> nn.Module:  # noqa: ARG002
        from recd_plugin_recd.pooling.modules import Reduction

        return Reduction(self.mode)

    def pool(
        self,
        modules: Sequence[nn.Module],  # noqa: ARG002
        sequences: Sequence[JaggedTensor],
    ) -> Tensor:
        from recd_plugin_recd.pooling.modules import reduce_rows

        return reduce_rows(sequences, self.mode)


class SumPooling(_Reduction):
    """Pools a sequence by the sum of its embeddings."""

    name = "recd.sum"
    mode = "sum"


class MeanPooling(_Reduction):
    """Pools a sequence by the mean of its embeddings."""

    name = "recd.mean"
    mode = "mean"


class MaxPooling(_Reduction):
    """Pools a sequence by the element-wise maximum of its embeddings."""

    name = "recd.max"
    mode = "max"
