"""The tiers of rows of a model that is being trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from recd_plugin_flexshard.planning import TierPlan
from recd_plugin_flexshard.report.tier_report import OtherTables, TierReport
from recd_plugin_flexshard.runtime import ShardedTieredEmbeddingCollection
from recd_plugins.api import TrainedRun
from recd_plugins.api.planning import bytes_of_tables, gradients_sent_once


def report_tiers(plans: Sequence[TierPlan], run: TrainedRun) -> TierReport:
    """What the tiers sent, next to what their plans predict for these ranks."""
    planned = {table.name for plan in plans for table in plan.tables}
    retierings = [
        report for module in tiered_modules(run.model).values() for report in module.retier_reports
    ]
    return TierReport.of(plans, run.sent, _other_tables(run, planned), retierings)


def _other_tables(run: TrainedRun, planned: set[str]) -> OtherTables:
    shardings = {
        name: sharding
        for path in tiered_modules(run.model)
        for name, sharding in run.plan.plan[path].items()
        if name not in planned
    }
    tables = [table for table in run.tables if table.name in shardings]
    if not tables:
        return OtherTables()
    profile = run.setting.data.profile()
    as_sent = replace(profile, gradients=gradients_sent_once(run.setting))
    predicted, plain = (
        sum(
            bytes_of_tables(
                tables,
                shardings,
                known,
                batch_size=run.setting.batch_size,
                world_size=run.setting.world_size,
                wire_bytes=run.setting.wire_bytes,
            ).values()
        )
        for known in (as_sent, profile.plain())
    )
    return OtherTables(tuple(table.name for table in tables), predicted, plain)


def tiered_modules(model: nn.Module) -> dict[str, ShardedTieredEmbeddingCollection]:
    """The sharded modules with tiers, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ShardedTieredEmbeddingCollection)
    }
