"""The command ``recd profile``: how often each row of a table is read, counted or drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

REQUIRES_API = 2


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_profiles.commands import profile

    cli.add_command(profile)
