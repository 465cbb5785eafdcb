"""``torchrec.row_wise``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recd_plugin_torchrec.coalescing import CoalescingSharding
from recd_plugins.api import Table

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints


class RowWise(CoalescingSharding):
    """The rows of each table split evenly over all ranks."""

    name = "torchrec.row_wise"

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """One sharding type for each of ``tables``."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {table.name: ParameterConstraints(sharding_types=["row_wise"]) for table in tables}
