"""What plugins add to ``recd`` besides parts of registry files, looked at."""

from __future__ import annotations

from recd_plugins.cli import PluginCommands
from recd_plugins.cli.init import Starts
from recd_plugins.cli.plan import plan_modes
from recd_plugins.cli.run import run
from recd_plugins.cli.run_reports import RunReports
from recd_plugins.manager import PluginManager


def check_contributions(manager: PluginManager) -> None:
    """Have the manager list as broken what adds something unusable, or names that are taken.

    Raises:
        PluginError: a file of ``--plugins-dir`` does.
    """
    manager.register_commands(PluginCommands())
    manager.hand("register_starts", Starts().add)
    manager.hand("register_plans", plan_modes().add)
    manager.hand("register_reports", RunReports(run.params).add)
    manager.register_topology_sections()
