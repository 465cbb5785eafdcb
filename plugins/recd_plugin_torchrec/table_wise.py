"""``torchrec.table_wise``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recd_plugin_torchrec.coalescing import CoalescingSharding
from recd_plugins.api import Table

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints


class TableWise(CoalescingSharding):
    """Each table whole on one rank, which the planner chooses."""

    name = "torchrec.table_wise"

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """One sharding type for each of ``tables``."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
