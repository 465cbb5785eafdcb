"""``recd.transformer``: a transformer encoder, then the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from recd_plugin_recd.pooling.attention import check_heads
from recd_plugins.api import PluginOptions, Pooling

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor


class TransformerPooling(Pooling):
    """Transformer encoder over a sequence, then the mean of its outputs."""

    name = "recd.transformer"
    always_trained = True

    class Options(PluginOptions):
        """Options of ``recd.transformer``."""

        layers: int = Field(default=1, gt=0, description="Layers of the encoder.")
        heads: int = Field(default=2, gt=0, description="Heads; they divide embedding_dim.")
        feed_forward: int | None = Field(
            default=None,
            gt=0,
            description="Hidden size of the feed-forward network; null takes 4 * embedding_dim.",
        )
        norm: Literal["pre", "post"] = Field(
            default="pre", description="Norm before each half of a layer, or after it."
        )

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.transformer_modules import Transformer

        options = self.options
        check_heads(self.name, options.heads, embedding_dim)
        feed_forward = options.feed_forward or 4 * embedding_dim
        return Transformer(embedding_dim, options.layers, options.heads, feed_forward, options.norm)

    def pool(self, modules: Sequence[Any], sequences: Sequence[JaggedTensor]) -> Tensor:
        return self.pool_groups([(modules, sequences)])[0]

    def pool_groups(
        self, groups: Sequence[tuple[Sequence[Any], Sequence[JaggedTensor]]]
    ) -> list[Tensor]:
        from recd_plugin_recd.pooling.packed_rows import all_groups_at_once
        from recd_plugin_recd.pooling.transformer_modules import pool_by_transformer

        return all_groups_at_once(pool_by_transformer, groups)
