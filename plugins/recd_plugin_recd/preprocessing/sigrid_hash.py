"""Ids of 64 bits into tables: TorchArrow's sigrid_hash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn


class SigridHash(ModulePreprocessing):
    """Hash ids of any size into [0, buckets), as TorchArrow's sigrid_hash does."""

    name = "recd.sigrid_hash"
    scope = "id"

    class Options(PluginOptions):
        """Where to hash to."""

        buckets: int = Field(
            gt=0, le=2**48, description="ids become 0 to buckets - 1; the rows of the table"
        )
        salt: int = Field(
            default=0, ge=-(2**63), lt=2**63, description="another salt gives other collisions"
        )

    options: Options

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.SigridHash(self.options.buckets, self.options.salt)
