"""``torchrec.planner``."""

from __future__ import annotations

from recd_plugin_torchrec.coalescing import CoalescingSharding


class Planner(CoalescingSharding):
    """TorchRec's planner decides, as for tables that no entry names."""

    name = "torchrec.planner"
