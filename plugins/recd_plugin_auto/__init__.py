"""The sharding ``auto``, which chooses among the others, and ``recd plan --auto``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    from recd_plugins.api import PlanMode, Sharding

REQUIRES_API = 4


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    from recd_plugin_auto.auto import Auto

    return [Auto]


@hookimpl
def register_plans() -> Sequence[type[PlanMode]]:
    from recd_plugin_auto.plan_mode import AutoPlan

    return [AutoPlan]
