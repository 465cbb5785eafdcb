"""Dynamic tables: embedding tables that assign rows to raw 64-bit ids while they train."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Plugin, hookimpl

REQUIRES_API = 2


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return []
