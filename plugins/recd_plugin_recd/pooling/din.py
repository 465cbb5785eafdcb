"""``recd.din``: attention of the row's item to a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from recd_plugin_recd.pooling.attention import check_heads
from recd_plugins.api import PluginOptions, TargetPooling

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor


class DinPooling(TargetPooling):
    """Target attention: the item's vector weighs a sequence, whose weighted sum is pooled.

    After Deep Interest Network (arXiv 1706.06978), with scaled dot products as scores.
    """

    name = "recd.din"
    always_trained = True

    class Options(PluginOptions):
        """Options of ``recd.din``."""

        target: str = Field(
            min_length=1, description="Feature of the item; its vector asks for the weights."
        )
        weights: Literal["softmax", "sigmoid"] = Field(
            default="softmax",
            description="softmax: weights of a row sum to 1. sigmoid: each value has a weight of "
            "its own, so that many that match count for more.",
        )
        heads: int = Field(default=1, gt=0, description="Heads; they divide embedding_dim.")

    options: Options

    @property
    def target(self) -> str:
        return self.options.target

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.din_modules import TargetAttention

        check_heads(self.name, self.options.heads, embedding_dim)
        return TargetAttention(embedding_dim, self.options.heads, self.options.weights)

    def pool_for(
        self,
        modules: Sequence[Any],
        sequences: Sequence[JaggedTensor],
        targets: Tensor,
        inverse: Tensor | None,
    ) -> Tensor:
        from recd_plugin_recd.pooling.din_modules import pool_for_targets

        return pool_for_targets(modules, sequences, targets, inverse)
