"""What the preprocessing of this package has in common: a module does the work."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

from recd_plugins.api import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModulePreprocessing(Preprocessing):
    """Preprocessing by a module over (values, offsets) that ``torch.jit.script`` takes."""

    @abstractmethod
    def build(self) -> nn.Module:
        """A new module with the options of this plugin."""

    @cached_property
    def module(self) -> nn.Module:
        """The module that ``transform`` runs."""
        return self.build()

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.module(values, offsets)
        return result
