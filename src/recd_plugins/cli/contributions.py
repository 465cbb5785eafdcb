"""What plugins add to ``recd`` besides parts of registry files."""

from __future__ import annotations

import click

from recd_plugins.cli import PluginCommands
from recd_plugins.manager import PluginManager


def check_contributions(manager: PluginManager) -> None:
    """Have the manager list as broken what adds something unusable, or names that are taken.

    Raises:
        PluginError: a file of ``--plugins-dir`` does.
    """
    from recd_plugins.cli.benchmarks import Benchmarks
    from recd_plugins.cli.plan import plan_modes

    manager.register_commands(PluginCommands())
    manager.register_plans(plan_modes().add)
    manager.register_benchmarks(Benchmarks().add)


def manager_of(ctx: click.Context) -> PluginManager:
    """The plugins of a command line: installed ones, and those of its ``--plugins-dir``."""
    return PluginManager(ctx.find_root().params.get("plugins_dir"))


def tell_broken(manager: PluginManager) -> None:
    """Say what is installed and cannot be used, where someone misses it."""
    for broken in manager.broken:
        click.secho(f"{broken.name} cannot be used: {broken.reason}", fg="red", err=True)
