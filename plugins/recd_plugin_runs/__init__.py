"""Commands for trained models and runs, such as evaluate, predict and runs, and trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import Plugin, RunReport

REQUIRES_API = 6


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_runs import commands
    from recd_plugin_runs.runs import runs_command

    for name in ("evaluate", "predict", "export", "embeddings", "report"):
        cli.add_command(getattr(commands, name))
    cli.add_command(runs_command)


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    from recd_plugin_runs.publish import Publish

    return [Publish]


@hookimpl
def register_reports() -> Sequence[type[RunReport]]:
    from recd_plugin_runs.commands import RunPage

    return [RunPage]
