"""Kind ``cache``: a fast tier in front of a table's storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from recd_plugins.interfaces.plugin import Plugin
from recd_plugins.interfaces.sharding import Table

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints


class Cache(Plugin, ABC):
    """Stores the tables that its registry entry names behind a cache."""

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Refuse a device on which the cache cannot run.

        Raises:
            SetupError: says what is missing and what to do.
        """

    @abstractmethod
    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """Compute kernel and cache parameters by table name; merged with those of the sharding."""
