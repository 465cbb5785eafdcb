"""Numbers as the share of training rows below them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugin_tables.preprocessing.fitted import FittedPreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import Tensor

# Numbers that are kept to find the borders.
_MOST = 1 << 22


class Quantiles(FittedPreprocessing):
    """Replace a number by its bucket's share: buckets hold equally many training rows, 0 to 1."""

    name = "tables.quantiles"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        """How fine."""

        buckets: int = Field(default=100, ge=2, le=2**20, description="How many there are.")

    options: Options

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:  # noqa: ARG002
        import torch

        from recd_plugins.api import rounded_borders

        kept, num_kept, step, seen = [torch.empty(0, dtype=torch.float64)], 0, 1, 0
        for values, _ in rows:
            # Every step-th number of all, wherever batches begin.
            kept.append(values[-seen % step :: step].double())
            seen += values.numel()
            num_kept += kept[-1].numel()
            while num_kept > _MOST:
                kept = [torch.cat(kept)[::2]]
                num_kept, step = kept[0].numel(), 2 * step
        numbers = torch.cat(kept).sort().values
        inner = torch.arange(1, self.options.buckets) * numbers.numel() // self.options.buckets
        borders = numbers[inner] if numbers.numel() else numbers
        self._state = {"borders": rounded_borders(borders)}

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        borders = self.state["borders"].to(values.device)
        buckets = torch.searchsorted(borders, values.to(borders.dtype).contiguous(), right=True)
        return (buckets / (self.options.buckets - 1)).to(values.dtype), offsets
