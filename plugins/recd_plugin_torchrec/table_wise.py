"""``torchrec.table_wise``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recd_plugin_torchrec.coalescing import CoalescingSharding, saves
from recd_plugins.api import Setting, Table

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints

# On more ranks most have no table, and a plan more takes seconds.
_MOST_RANKS = 64


class TableWise(CoalescingSharding):
    """Each table whole on one rank, which the planner chooses."""

    name = "torchrec.table_wise"

    def constraints(self, tables: Sequence[Table]) -> Mapping[str, ParameterConstraints]:
        """One sharding type for each of ``tables``."""
        from torchrec.distributed.planner.types import ParameterConstraints

        return {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: Setting) -> Sequence[Mapping[str, Any]]:
        """Coalesced sequences, where that sends less: the planner splits their tables by rows.

        It does so by estimates of each shard, which leave out that embeddings of split tables are
        put in order once more where they arrive.
        """
        few = 1 < setting.world_size <= _MOST_RANKS
        return (
            [{"coalesce": True}] if few and saves(tables, setting) and not tables[0].pooled else []
        )
