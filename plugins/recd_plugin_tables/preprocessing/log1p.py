"""Numbers of any size brought together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugins.api import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


class Log1p(Preprocessing):
    """Replace x by log(1 + x), and a negative one by -log(1 - x)."""

    name = "tables.log1p"
    scope = "id"
    takes = ("numbers",)

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return values.sign() * values.abs().log1p(), offsets
