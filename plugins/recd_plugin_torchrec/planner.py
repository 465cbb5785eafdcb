"""``torchrec.planner``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

from pydantic import Field, model_validator

from recd_plugin_torchrec.coalescing import CoalesceOptions, CoalescingSharding, saves
from recd_plugins.api import PlanContext, Table


class Planner(CoalescingSharding):
    """TorchRec's planner decides, as for tables that no entry names."""

    name = "torchrec.planner"

    class Options(CoalesceOptions):
        """What is sent, and what need not be."""

        replicate: bool = Field(
            default=False,
            description="Small tables may be on every rank: of deduplicated batches on CPU, and of "
            "sequences.",
        )

        @model_validator(mode="after")
        def _not_both(self) -> Self:
            if self.coalesce and self.replicate:
                raise ValueError(
                    "coalesce and replicate: ids of replicated tables are not sent; leave one out"
                )
            return self

    @property
    def may_replicate(self) -> bool:
        """As the option says."""
        return cast(Planner.Options, self.options).replicate

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: PlanContext) -> Sequence[Mapping[str, Any]]:
        """Coalesced or on every rank, where that may send less; the planner has them anyway."""
        offered = [{"coalesce": True}] if saves(tables, setting) else []
        return [*offered, {"replicate": True}] if _some_are_small(tables, setting) else offered


def _some_are_small(tables: Sequence[Table], setting: PlanContext) -> bool:
    """Whether gradients may be summed up in less time than embeddings are sent.

    Of one of the tables; or of all of them in the latency of the collectives that this spares.
    """
    if setting.device_type != "cpu" or setting.world_size == 1:
        return False
    profile, batch_size = replace(setting.data.profile(), distinct={}), setting.batch_size

    def sent(table: Table) -> float:
        return (profile.rows if table.pooled else profile.ids)(table, batch_size)

    if any(table.num_embeddings < sent(table) for table in tables):
        return True
    if setting.costs is None:
        return False
    from recd_plugins.api import COLLECTIVES

    reduced = sum(4 * table.embedding_dim * table.num_embeddings for table in tables)
    latency = COLLECTIVES * setting.costs.all_to_all.collectives
    return reduced * setting.costs.all_reduce.bytes_reduced < latency
