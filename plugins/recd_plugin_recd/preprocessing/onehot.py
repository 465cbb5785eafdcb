"""Classes as zeros and ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn


class Onehot(ModulePreprocessing):
    """Make of each value v as many zeros as there are classes, with a 1 at place v."""

    name = "recd.onehot"
    takes = ("ids", "numbers")

    class Options(PluginOptions):
        """How many classes there are."""

        classes: int = Field(ge=1, le=2**20, description="values from 0 to classes - 1")

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        self.width = self.options.classes

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.Onehot(self.options.classes)
