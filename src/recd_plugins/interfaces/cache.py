"""Kind ``cache``: fast memory in front of a table's storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.values.rows import Table

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints

    from recd_plugins.interfaces.setting import PlanContext
    from recd_plugins.interfaces.table_part import TableStrategy


class Cache(Plugin, ABC):
    """Stores the tables that its registry entry names behind a cache.

    One with kernels of its own overrides ``part``; one that overrides ``constraints`` has a kernel
    of TorchRec's.
    """

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Refuse a device on which the cache cannot run.

        Raises:
            SetupError: says what is missing and what to do.
        """

    def part(
        self,
        tables: Sequence[Table],  # noqa: ARG002
        setting: PlanContext,  # noqa: ARG002
    ) -> TableStrategy | None:
        """What it does to ``tables``: kernels, memory, and what a run shows; None: nothing.

        Every rank calls it by itself and must come to the same.
        """
        return None

    def constraints(
        self,
        tables: Sequence[Table],  # noqa: ARG002
    ) -> Mapping[str, ParameterConstraints]:
        """Kernel and cache parameters by table name, of tables that have a kernel of TorchRec's.

        Merged with the constraints of the sharding and of parts.
        """
        return {}
