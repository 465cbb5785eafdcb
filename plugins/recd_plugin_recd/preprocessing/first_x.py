"""Histories cut to their first ids: TorchArrow's firstx."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import Tensor, nn


class FirstX(ModulePreprocessing):
    """Keep the first x ids of each row, as TorchArrow's firstx does."""

    name = "recd.first_x"

    class Options(PluginOptions):
        """Where to cut."""

        x: int = Field(ge=0, lt=2**31, description="ids that a row keeps, from its start")

    options: Options

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.FirstX(self.options.x)

    def kept_lengths(self, lengths: Tensor) -> Tensor:
        return lengths.clamp(max=self.options.x)
