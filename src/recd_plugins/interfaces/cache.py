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

    from recd_plugins.distributed.cached.spec import TableCache
    from recd_plugins.interfaces.setting import Setting
    from recd_plugins.planning.caching import CachePlan


class Cache(Plugin, ABC):
    """Stores the tables that its registry entry names behind a cache.

    One that overrides ``caches`` gets the cached kernels of this package; one that overrides
    ``constraints`` has a kernel of TorchRec's.
    """

    kind: ClassVar[str] = "cache"

    @abstractmethod
    def check(self, device: torch.device) -> None:
        """Refuse a device on which the cache cannot run.

        Raises:
            SetupError: says what is missing and what to do.
        """

    def caches(
        self,
        tables: Sequence[Table],  # noqa: ARG002
        setting: Setting,  # noqa: ARG002
    ) -> Mapping[str, TableCache]:
        """How each of ``tables`` is cached by this package's kernels, by its name.

        The planner gives these tables the kernel ``fused_uvm_caching`` and their load factors. A
        table that is left out keeps the kernels that it had. Every rank calls this by itself and
        must come to the same.
        """
        return {}

    def plan(
        self,
        tables: Sequence[Table],  # noqa: ARG002
        setting: Setting,  # noqa: ARG002
    ) -> CachePlan | None:
        """What is expected of these caches: hits, and bytes of the slow tier; None if unknown.

        ``recd run`` shows it next to what it counts, and TorchRec's planner reckons with it.
        """
        return None

    def constraints(
        self,
        tables: Sequence[Table],  # noqa: ARG002
    ) -> Mapping[str, ParameterConstraints]:
        """Kernel and cache parameters by table name, of tables that have a kernel of TorchRec's.

        Merged with the constraints of the sharding; called after ``caches``.
        """
        return {}
