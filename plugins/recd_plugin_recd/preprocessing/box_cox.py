"""Skewed numbers made less so: the Box-Cox transform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn


class BoxCox(ModulePreprocessing):
    """Make (y^lambda1 - 1) / lambda1 of y = x + lambda2, as Caffe2's BatchBoxCox does."""

    name = "recd.box_cox"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        """The two parameters of the transform."""

        lambda1: float = Field(
            allow_inf_nan=False, description="the exponent; with 0 the result is log(y)"
        )
        lambda2: float = Field(
            default=0.0, allow_inf_nan=False, description="added to numbers, so that y > 0"
        )

    options: Options

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.BoxCox(self.options.lambda1, self.options.lambda2)
