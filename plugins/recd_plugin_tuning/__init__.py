"""Tuning commands: ``recd calibrate``, ``recd profile``, ``recd plan --auto`` and ``--scaling``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import plan_modes

REQUIRES_API = 4


@hookimpl
def register_plans() -> Sequence[type[plan_modes.PlanMode]]:
    from recd_plugin_tuning.plan_modes import AutoPlan, ScalingPlan

    return [AutoPlan, ScalingPlan]


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_tuning.calibrate import calibrate
    from recd_plugin_tuning.profile import profile

    cli.add_command(calibrate)
    cli.add_command(profile)


@hookimpl
def register_measurements() -> Sequence[type[plan_modes.Measurement]]:
    from recd_plugin_tuning.plan_modes import Calibrated

    return [Calibrated]
