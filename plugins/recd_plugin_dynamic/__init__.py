"""Dynamic tables: embedding tables that assign rows to raw 64-bit ids while they train."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Sharding, hookimpl

REQUIRES_API = 6


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    from recd_plugin_dynamic.sharding import DynamicSharding

    return [DynamicSharding]
