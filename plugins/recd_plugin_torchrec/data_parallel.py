"""``torchrec.data_parallel``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import Sharding, Table

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints


class DataParallel(Sharding):
    """Each table whole on every rank, its gradients averaged. For small tables."""

    name = "torchrec.data_parallel"
    replicates = True

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """One sharding type for each of ``tables``."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(sharding_types=["data_parallel"]) for table in tables
        }
