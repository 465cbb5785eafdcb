"""Imports a user's own tables, in any common format, as datasets for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import Plugin, hookimpl

if TYPE_CHECKING:
    import click

REQUIRES_API = 2


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    from recd_plugin_tables.preprocessing import Log1p, Quantiles, Standardise, Vocabulary
    from recd_plugin_tables.table import Table

    return [Table, Vocabulary, Standardise, Log1p, Quantiles]


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_tables.histories.command import histories

    cli.add_command(histories)


@hookimpl
def register_starts() -> Sequence[click.Command]:
    from recd_plugin_tables.start.command import init

    return [init]
