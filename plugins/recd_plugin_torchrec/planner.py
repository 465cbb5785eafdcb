"""``torchrec.planner``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

from pydantic import Field, model_validator

from recd_plugin_torchrec.coalescing import CoalesceOptions, CoalescingSharding, saves
from recd_plugins.api import Setting, Table

# Of lengths, ids and embeddings, and of the gradients that come back.
_COLLECTIVES = 4


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
    def offers(cls, tables: Sequence[Table], setting: Setting) -> Sequence[Mapping[str, Any]]:
        """Coalesced or on every rank, where that may send less; the planner has them anyway."""
        offered = [{"coalesce": True}] if saves(tables, setting) else []
        return [*offered, {"replicate": True}] if _some_are_small(tables, setting) else offered


def _some_are_small(tables: Sequence[Table], setting: Setting) -> bool:
    """Whether to sum up a table's gradients may take no longer than to send embeddings of it.

    A rank sends them in collectives, which it does without where every table is replicated.
    """
    if setting.device_type != "cpu" or setting.world_size == 1:
        return False
    profile, batch_size = replace(setting.data.profile(), distinct={}), setting.batch_size
    latency, byte = 0.0, 0.0
    if setting.costs is not None:
        latency = _COLLECTIVES * setting.costs.all_to_all.collectives
        byte = setting.costs.all_reduce.bytes_reduced

    def reduced(table: Table) -> float:
        """Rows whose gradients are summed up in that latency."""
        row = 4 * table.embedding_dim * byte
        return latency / row if row else 0.0

    def sent(table: Table) -> float:
        return (profile.rows if table.pooled else profile.ids)(table, batch_size)

    return any(table.num_embeddings < sent(table) + reduced(table) for table in tables)
