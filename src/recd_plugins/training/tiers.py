"""The tiers of rows of a model that is being trained, where it has any."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from recd_plugins.distributed.byte_counter import Kind
from recd_plugins.distributed.tiered import ShardedTieredEmbeddingCollection
from recd_plugins.planning.work import bytes_of_tables
from recd_plugins.training.assembly import Assembled
from recd_plugins.training.tier_report import OtherTables, TierReport

_COLLECTIVES: dict[str, Kind] = {
    "cold": "all_to_all",
    "hot": "all_reduce",
    "flex": "all_to_all",
    "flex_gradients": "all_reduce",
}


def tiers_of_collectives(model: nn.Module) -> dict[tuple[str, Kind], str]:
    """Tier by name of the process group and kind of its collectives; empty without tiers."""
    return {
        (group, _COLLECTIVES[tier]): tier
        for module in _tiered(model).values()
        for group, tier in module.groups.names.items()
    }


def report_tiers(parts: Assembled, observed: Mapping[str, float] | None) -> TierReport | None:
    """What the tiers sent, next to what their plans predict for these ranks; None without tiers.

    Args:
        parts: the trained model.
        observed: bytes of all ranks in one step by tier; None where nothing was counted.
    """
    setting, prepared = parts.setting, parts.registry.prepared
    if setting is None or prepared is None or not prepared.tier_plans:
        return None
    plans = list(prepared.tier_plans.values())
    planned = {table.name for plan in plans for table in plan.tables}
    retierings = [
        report for module in _tiered(parts.dmp).values() for report in module.retier_reports
    ]
    return TierReport.of(plans, observed, _other_tables(parts, planned), retierings)


def _other_tables(parts: Assembled, planned: set[str]) -> OtherTables:
    assert parts.setting is not None, "there are tiers"
    shardings = {
        name: sharding
        for path in _tiered(parts.dmp.module)
        for name, sharding in parts.dmp.plan.plan[path].items()
        if name not in planned
    }
    tables = [table for table in parts.tables if table.name in shardings]
    if not tables:
        return OtherTables()
    profile = parts.setting.data.profile()
    predicted, plain = (
        sum(
            bytes_of_tables(
                tables,
                shardings,
                known,
                batch_size=parts.setting.batch_size,
                world_size=parts.setting.world_size,
            ).values()
        )
        for known in (profile, profile.plain())
    )
    return OtherTables(tuple(table.name for table in tables), predicted, plain)


def _tiered(model: nn.Module) -> dict[str, ShardedTieredEmbeddingCollection]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ShardedTieredEmbeddingCollection)
    }
