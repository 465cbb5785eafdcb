"""Plugin ``example.drop_repeats``: removes consecutive repeats of an id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugins.api import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


class DropRepeats(Preprocessing):
    """Removes consecutive repeats of an id in each list: 7 7 7 3 3 7 becomes 7 3 7."""

    name = "example.drop_repeats"

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        keep = torch.ones_like(values, dtype=torch.bool)
        keep[1:] = values[1:] != values[:-1]
        starts = offsets[:-1][offsets.diff() > 0]
        keep[starts] = True  # always keep the first id of a row
        kept = torch.cat([offsets.new_zeros(1), keep.cumsum(0).to(offsets.dtype)])
        return values[keep], kept[offsets]
