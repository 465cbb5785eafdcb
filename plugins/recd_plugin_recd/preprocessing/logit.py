"""Shares and probabilities on the whole line: log odds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn


class Logit(ModulePreprocessing):
    """Make log(x / (1 - x)) of numbers from 0 to 1, as Caffe2's Logit does."""

    name = "recd.logit"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        """How close to 0 and 1 numbers may come."""

        eps: float = Field(
            default=1e-6, gt=0, lt=0.5, description="numbers are moved into [eps, 1 - eps] first"
        )

    options: Options

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.Logit(self.options.eps)
