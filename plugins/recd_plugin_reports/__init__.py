"""Runs as pages of HTML: the command ``recd report``, and ``recd run --html``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import RunReport

REQUIRES_API = 4


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_reports.commands import report

    cli.add_command(report)


@hookimpl
def register_reports() -> Sequence[type[RunReport]]:
    from recd_plugin_reports.run_page import RunPage

    return [RunPage]
