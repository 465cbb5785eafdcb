"""``torchrec.table_wise``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recd_plugin_torchrec.coalescing import CoalescingSharding, saves
from recd_plugins.api import PlanContext, Table

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints


class TableWise(CoalescingSharding):
    """Each table whole on one rank, which the planner chooses."""

    name = "torchrec.table_wise"

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """One sharding type for each of ``tables``."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Sequences on CPUs, whose rows the planner splits: ranks without a table call no kernel.

        What is sent leaves them to one rank; where processors take the time, that counts less.
        """
        costs = setting.costs
        if setting.world_size == 1 or costs is None or not costs.lookup.lookups:
            return []
        sequences = [table for table in tables if not table.pooled]
        if setting.device_type != "cpu" or not sequences:
            return []
        return [{}, {"coalesce": True}] if saves(sequences, setting) else [{}]
