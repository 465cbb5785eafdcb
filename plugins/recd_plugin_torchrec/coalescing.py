"""The option that all but ``torchrec.data_parallel`` have, whose ids are not sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from recd_plugins.api import PlanContext, PluginOptions, Sharding, Table


class CoalesceOptions(PluginOptions):
    """What is sent."""

    coalesce: bool = Field(
        default=False, description="Send each id of a table once a batch and rank."
    )


class CoalescingSharding(Sharding):
    """A kind of sharding whose ids may be coalesced."""

    class Options(CoalesceOptions):
        """Only that."""

    options: CoalesceOptions

    @property
    def coalesces(self) -> bool:
        """As the option says."""
        return self.options.coalesce


def saves(tables: Sequence[Table], setting: PlanContext) -> bool:
    """Whether coalescing may send less of tables: of bags, fewer rows than ranks send sums."""
    profile, batch_size = setting.data.profile(), setting.batch_size
    uncoalesced = replace(profile, distinct={})

    def sent(table: Table) -> float:
        ids = uncoalesced.ids(table, batch_size)
        sums = setting.world_size * uncoalesced.rows(table, batch_size)
        return min(ids, sums) if table.pooled else ids

    known = [table for table in tables if table.name in profile.distinct]
    return any(profile.ids(table, batch_size) < sent(table) for table in known)
