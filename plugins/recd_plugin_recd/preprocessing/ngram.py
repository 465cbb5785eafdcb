"""Neighbouring ids as one: what comes after what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn


class NGram(ModulePreprocessing):
    """Make one id of each n neighbouring ids of a row: a 63-bit hash of them in order."""

    name = "recd.ngram"

    class Options(PluginOptions):
        """How many ids make one."""

        n: int = Field(default=2, ge=2, le=16, description="neighbours that become one id")
        salt: int = Field(
            default=0, ge=-(2**63), lt=2**63, description="another salt gives other collisions"
        )

    options: Options

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.NGram(self.options.n, self.options.salt)
