"""``example.recency``: a mean in which the newest items weigh most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugins.api import PluginOptions, Pooling

if TYPE_CHECKING:
    from torch import nn


class Recency(Pooling):
    """Weighted mean of a sequence; an item's weight halves every half_life places from its end."""

    name = "example.recency"
    always_trained = True  # there are no parameters

    class Options(PluginOptions):
        half_life: float = Field(default=10.0, gt=0, description="Places that halve a weight.")

    options: Options

    def build(self, embedding_dim: int) -> nn.Module:  # noqa: ARG002
        from recd_plugin_example.recency_module import RecencyPooling

        return RecencyPooling(self.options.half_life)
