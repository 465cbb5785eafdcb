"""Plugin ``example.recency``: a weighted mean with the largest weights for the newest items."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugins.api import PluginOptions, Pooling

if TYPE_CHECKING:
    from torch import nn


class Recency(Pooling):
    """Pools a sequence by a weighted mean. Weights halve every ``half_life`` items of age."""

    name = "example.recency"
    always_trained = True  # has no parameters

    class Options(PluginOptions):
        half_life: float = Field(default=10.0, gt=0, description="Items after which weights halve.")

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:  # noqa: ARG002
        from recd_plugin_example.recency_module import RecencyPooling

        return RecencyPooling(self.options.half_life)
