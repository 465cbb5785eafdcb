"""The flag ``recd plan --scaling``: how the predicted step of a model goes with its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    from recd_plugins.api import PlanMode

REQUIRES_API = 4


@hookimpl
def register_plans() -> Sequence[type[PlanMode]]:
    from recd_plugin_scaling.plan_mode import ScalingPlan

    return [ScalingPlan]
