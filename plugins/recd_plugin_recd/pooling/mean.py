"""``recd.mean``: the mean of a row's embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugins.interfaces import Pooling

if TYPE_CHECKING:
    from torch import nn


class MeanPooling(Pooling):
    """Mean of a sequence's embeddings."""

    name = "recd.mean"

    def build(self, embedding_dim: int) -> nn.Module:  # noqa: ARG002
        from recd_plugin_recd.pooling.modules import Mean

        return Mean()
