"""``torchrec.planner``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recd_plugin_torchrec.coalescing import CoalescingSharding, saves
from recd_plugins.api import Setting, Table


class Planner(CoalescingSharding):
    """TorchRec's planner decides, as for tables that no entry names."""

    name = "torchrec.planner"

    @classmethod
    def offers(cls, tables: Sequence[Table], setting: Setting) -> Sequence[Mapping[str, Any]]:
        """Coalesced, where that may send less; without it the planner has them anyway."""
        return [{"coalesce": True}] if saves(tables, setting) else []
