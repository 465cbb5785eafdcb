"""The cached tables of a model that is being trained, where it has any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingType

from recd_plugins.distributed.cached.traffic import cache_traffic
from recd_plugins.training.assembly import Assembled
from recd_plugins.training.cache_report import CachedTableReport, CacheReport, StepTraffic

_COLUMN_WISE = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)


def counted_by_step(model: nn.Module, steps: int) -> dict[str, StepTraffic]:
    """What this rank's part of each cached table moved in a step, the mean of ``steps``."""
    return {
        name: StepTraffic(**{f.name: getattr(counts, f.name) / steps for f in fields(StepTraffic)})
        for name, counts in cache_traffic(model).items()
        if steps
    }


def report_caches(parts: Assembled, observed: Mapping[str, StepTraffic]) -> CacheReport | None:
    """What cached tables moved, next to what was predicted for these ranks; None without any.

    Args:
        parts: the trained model.
        observed: of all ranks, by table; empty where no step was trained.
    """
    caches = parts.registry.caches
    if not caches:
        return None
    shardings = {
        name: sharding
        for module in parts.dmp.plan.plan.values()
        if isinstance(module, EmbeddingModuleShardingPlan)
        for name, sharding in module.items()
    }
    tables = [table for table in parts.tables if table.name in caches]
    return CacheReport(
        tuple(
            CachedTableReport(
                table.name,
                caches[table.name].policy,
                table.num_embeddings,
                caches[table.name].num_cached_rows(table.num_embeddings),
                observed.get(table.name),
                _predicted(parts, table.name, shardings[table.name]),
            )
            for table in tables
        )
    )


def _predicted(parts: Assembled, name: str, sharding: ParameterSharding) -> StepTraffic | None:
    assert parts.registry.prepared is not None, "it has caches"
    for plan in parts.registry.prepared.cache_plans.values():
        if name in plan.tables:
            expected = plan.tables[name].traffic
            if sharding.sharding_type in _COLUMN_WISE:
                expected = expected.column_wise(len(sharding.ranks or ()))
            return StepTraffic(**{f.name: getattr(expected, f.name) for f in fields(StepTraffic)})
    return None
