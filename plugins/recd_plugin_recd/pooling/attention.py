"""``recd.attention``: one layer of multi-head self-attention, then the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugins.errors import RecdError
from recd_plugins.interfaces import PluginOptions, Pooling

if TYPE_CHECKING:
    from torch import nn


class AttentionPooling(Pooling):
    """Self-attention over a sequence, then the mean of its outputs."""

    name = "recd.attention"

    class Options(PluginOptions):
        """Options of ``recd.attention``."""

        heads: int = Field(default=2, gt=0, description="Heads; they divide embedding_dim.")

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:
        from recd_plugin_recd.pooling.modules import SelfAttention

        heads = self.options.heads
        if embedding_dim % heads:
            raise RecdError(
                f"recd.attention: heads ({heads}) must divide the model's embedding_dim "
                f"({embedding_dim})"
            )
        return SelfAttention(embedding_dim, heads)
