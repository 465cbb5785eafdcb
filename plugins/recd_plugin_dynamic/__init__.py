"""Dynamic tables: embedding tables that assign rows to raw 63-bit ids while they train."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Plugin, hookimpl

REQUIRES_API = 6


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    from recd_plugin_dynamic.eviction_log import EvictionLog
    from recd_plugin_dynamic.sharding import DynamicSharding

    return [DynamicSharding, EvictionLog]
