"""``recd.attention``: one layer of multi-head self-attention, then the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from recd_plugins.api import PluginOptions, Pooling, RecdError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchrec.sparse.jagged_tensor import JaggedTensor


class AttentionPooling(Pooling):
    """Self-attention over a sequence, then the mean of its outputs."""

    name = "recd.attention"
    always_trained = True

    class Options(PluginOptions):
        """Options of ``recd.attention``."""

        heads: int = Field(default=2, gt=0, description="Heads; they divide embedding_dim.")

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.attention_modules import SelfAttention

        check_heads(self.name, self.options.heads, embedding_dim)
        return SelfAttention(embedding_dim, self.options.heads)

    def pool(self, modules: Sequence[Any], sequences: Sequence[JaggedTensor]) -> Tensor:
        return self.pool_groups([(modules, sequences)])[0]

    def pool_groups(
        self, groups: Sequence[tuple[Sequence[Any], Sequence[JaggedTensor]]]
    ) -> list[Tensor]:
        from recd_plugin_recd.pooling.attention_modules import pool_by_attention
        from recd_plugin_recd.pooling.packed_rows import all_groups_at_once

        return all_groups_at_once(pool_by_attention, groups)


def check_heads(plugin: str, heads: int, embedding_dim: int) -> None:
    """Refuse heads that do not divide the dimension.

    Raises:
        RecdError: they do not.
    """
    if embedding_dim % heads:
        raise RecdError(
            f"{plugin}: heads ({heads}) must divide the model's embedding_dim ({embedding_dim})"
        )
