"""``recd plan`` without the flag of a mode: the sharding plan of the tables."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recd_plugins.planning.measurement import needed_measurement
from recd_plugins.planning.plan_mode import PlanAnswer, PlanMode, PlanQuestion

if TYPE_CHECKING:
    from rich.console import RenderableType

    from recd_plugins.planning.topologies import TopologySpec


class TablesPlan(PlanMode):
    """The plan of the tables, by TorchRec's planner, next to TorchRec's own."""

    takes_auto = True
    calibrates = "machine"

    def calibrate(self, question: PlanQuestion, path: Path) -> tuple[TopologySpec, RenderableType]:
        """Train a few steps on this machine."""
        question.say("training a few steps to see what they cost")
        return needed_measurement("--calibrate", question.plugins_dir).steps(question, path)

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Read the first rows, and plan."""
        from recd_plugins.planning.report_plot import plot
        from recd_plugins.planning.report_text import render
        from recd_plugins.planning.study import study

        question.say("reading the first rows")
        made = study(question.registry, question.topology, question.spec, question.say)
        report = made.report(question.registry, question.batch_size)
        return PlanAnswer(render(report), report.as_json, partial(plot, report))
