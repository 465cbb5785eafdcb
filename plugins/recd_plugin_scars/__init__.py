"""The SCARS paper's cache of frequently read table rows, and batches that read only cached rows."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Cache, Dataset, hookimpl, plan_modes

REQUIRES_API = 2


@hookimpl
def register_datasets() -> Sequence[type[Dataset]]:
    from recd_plugin_scars.hot_batches import HotBatches

    return [HotBatches]


@hookimpl
def register_caches() -> Sequence[type[Cache]]:
    from recd_plugin_scars.cache import ScarsCache

    return [ScarsCache]


@hookimpl
def register_plans() -> Sequence[type[plan_modes.PlanMode]]:
    from recd_plugin_scars.plan_cache import CachePlanMode

    return [CachePlanMode]
