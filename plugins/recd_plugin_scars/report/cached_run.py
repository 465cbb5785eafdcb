"""The cached tables of a model that is being trained, where it has any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingType

from recd_plugin_scars.planning import CachedTable
from recd_plugin_scars.report.cache_report import (
    CachedTableReport,
    CacheReport,
    StepTraffic,
    merged,
)
from recd_plugin_scars.runtime.kernel import cache_traffic
from recd_plugin_scars.runtime.spec import TableCache
from recd_plugins.api import TrainedRun

_COLUMN_WISE = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)


def counted_by_step(model: nn.Module, steps: int) -> dict[str, StepTraffic]:
    """What this rank's part of each cached table moved in a step, the mean of ``steps``."""
    return {
        name: StepTraffic(**{f.name: getattr(counts, f.name) / steps for f in fields(StepTraffic)})
        for name, counts in cache_traffic(model).items()
        if steps
    }


def report_caches(
    caches: Mapping[str, TableCache],
    expected: Mapping[str, CachedTable],
    run: TrainedRun,
) -> CacheReport:
    """What cached tables moved, next to what was predicted for these ranks.

    Args:
        caches: of tables, by name.
        expected: of them, by name.
        run: whose ranks have observed ``counted_by_step``; nothing where no step was trained.
    """
    observed = merged(run.observed)
    shardings = {
        name: sharding
        for module in run.plan.plan.values()
        if isinstance(module, EmbeddingModuleShardingPlan)
        for name, sharding in module.items()
    }
    return CacheReport(
        tuple(
            CachedTableReport(
                table.name,
                caches[table.name].policy_name,
                table.num_embeddings,
                caches[table.name].num_cached_rows(table.num_embeddings),
                observed.get(table.name),
                _predicted(expected.get(table.name), shardings[table.name]),
            )
            for table in run.tables
            if table.name in caches
        )
    )


def _predicted(table: CachedTable | None, sharding: ParameterSharding) -> StepTraffic | None:
    if table is None:
        return None
    expected = table.traffic
    if sharding.sharding_type in _COLUMN_WISE:
        expected = expected.column_wise(len(sharding.ranks or ()))
    return StepTraffic(**{f.name: getattr(expected, f.name) for f in fields(StepTraffic)})
