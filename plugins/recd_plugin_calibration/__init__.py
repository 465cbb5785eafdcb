"""The command ``recd calibrate``, and what runs on several nodes measure at their start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import Measurement

REQUIRES_API = 4


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_calibration.commands import calibrate

    cli.add_command(calibrate)


@hookimpl
def register_measurements() -> Sequence[type[Measurement]]:
    from recd_plugin_calibration.measurement import Calibrated

    return [Calibrated]
