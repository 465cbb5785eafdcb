"""``recd plan --auto``: the plan of the tables with what ``auto`` chooses."""

from __future__ import annotations

from dataclasses import replace

from recd_plugins.api import PlanAnswer, PlanQuestion
from recd_plugins.api.commands import TablesPlan
from recd_plugins.api.registry import load_registry


class AutoPlan(TablesPlan):
    """The plan of the tables with ``auto`` in place of the first sharding entry.

    ``--calibrate`` trains the file as it is: what it measures is of this machine, and ``auto``
    chooses by that.
    """

    flag = "--auto"
    help = "Choose the sharding as use: auto does, in place of the first sharding entry."

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Plan with it."""
        path = question.registry.path
        registry = load_registry(path, plugins_dir=question.plugins_dir, sharding="auto")
        return super().plan(replace(question, registry=registry))
