"""The plugins of a command line, and those of them that cannot be used."""

from __future__ import annotations

import click

from recd_plugins.manager import PluginManager


def manager_of(ctx: click.Context) -> PluginManager:
    """The plugins of a command line: installed ones, and those of its ``--plugins-dir``."""
    return PluginManager(ctx.find_root().params.get("plugins_dir"))


def tell_broken(manager: PluginManager) -> None:
    """Say what is installed and cannot be used, where someone misses it."""
    for broken in manager.broken:
        click.secho(f"{broken.name} cannot be used: {broken.reason}", fg="red", err=True)
