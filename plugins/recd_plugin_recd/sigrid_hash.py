"""Ids of 64 bits into tables: TorchArrow's sigrid_hash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugins.interfaces import PluginOptions, Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


class SigridHash(Preprocessing):
    """Hash ids of any size into [0, buckets), as TorchArrow's sigrid_hash does."""

    name = "recd.sigrid_hash"

    class Options(PluginOptions):
        """Where to hash to."""

        buckets: int = Field(
            gt=0, le=2**48, description="ids become 0 to buckets - 1; the rows of the table"
        )
        salt: int = Field(
            default=0, ge=-(2**63), lt=2**63, description="another salt gives other collisions"
        )

    options: Options

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        from recd_plugin_recd import sigrid_kernels as kernels

        hash_ids = kernels.hash_on_cpu if values.device.type == "cpu" else kernels.hash_by_torch
        return hash_ids(values, self.options.salt, self.options.buckets), offsets.clone()
