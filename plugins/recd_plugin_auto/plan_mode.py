"""``recd plan --auto``: the plan of the tables with what ``auto`` chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recd_plugins.api import PlanAnswer, PlanQuestion
from recd_plugins.api.commands import TablesPlan
from recd_plugins.api.registry import load_registry

if TYPE_CHECKING:
    from rich.console import RenderableType

    from recd_plugins.api.planning import TopologySpec


class AutoPlan(TablesPlan):
    """The plan of the tables with ``auto`` in place of the first sharding entry."""

    flag = "--auto"
    help = "Choose the sharding as use: auto does, in place of the first sharding entry."

    def calibrate(self, question: PlanQuestion, path: Path) -> tuple[TopologySpec, RenderableType]:
        """Train with it."""
        return super().calibrate(_with_auto(question), path)

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Plan with it."""
        return super().plan(_with_auto(question))


def _with_auto(question: PlanQuestion) -> PlanQuestion:
    path = question.registry.path
    registry = load_registry(path, plugins_dir=question.plugins_dir, sharding="auto")
    return replace(question, registry=registry)
