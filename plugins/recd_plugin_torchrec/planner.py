"""``torchrec.planner``."""

from __future__ import annotations

from recd_plugins.interfaces import Sharding


class Planner(Sharding):
    """TorchRec's planner decides, as for tables that no entry names."""

    name = "torchrec.planner"
