"""Kind ``optimizer``: what trains the rows of tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.values.rows import Table

if TYPE_CHECKING:
    import torch


class RowUpdate(NamedTuple):
    """The update of a table's rows in the backward pass, in the terms of TorchRec.

    Attributes:
        optimizer: a class that FBGEMM has a kernel of, of ``torchrec.optim`` or ``torch.optim``.
        arguments: of it, as ``apply_optimizer_in_backward`` takes them: ``lr``, ``eps``, and others
            that FBGEMM's kernels take. What is left out is as the ``training`` section says.
    """

    optimizer: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]


class Optimizer(Plugin, ABC):
    """Trains the tables that its registry entry names; the others go by the ``training`` section.

    The planner knows of each class whether it trains parts of a row as it trains whole rows, and
    splits columns of its own accord only where it does.
    """

    kind: ClassVar[str] = "optimizer"

    @abstractmethod
    def update(self, table: Table) -> RowUpdate:
        """How the rows of ``table`` are updated.

        Every rank calls it by itself and must come to the same.
        """
