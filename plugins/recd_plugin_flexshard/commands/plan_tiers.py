"""``recd plan --tiers``: which rows live where, for any cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import PlanAnswer, PlanMode, PlanQuestion
from recd_plugins.api.commands import ABOVE_0, SHARE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from recd_plugins.api.planning import TopologySpec
    from recd_plugins.api.registry import RunConfig


class TiersPlan(PlanMode):
    """The tiers of rows that the registry's entries choose, and what others would give."""

    flag = "--tiers"
    help = (
        "Plan tiers of rows instead: what flexshard's entries choose, and what others would give. "
        "--calibrate measures collectives, and memory of copied rows."
    )
    calibrates = "topology"
    because = "are chosen for a number of rows"

    def options(self) -> Sequence[click.Option]:
        """What if a rank had other memory, or hid more."""
        return [
            click.Option(
                ["--budget", "memory_ratio"],
                type=ABOVE_0,
                metavar="RATIO",
                help="memory of a rank over that of row-wise, in place of the entries' own.",
            ),
            click.Option(
                ["--overlap"],
                type=SHARE,
                metavar="SHARE",
                help="how much of the other collectives' time work hides, 0 to 1, likewise.",
            ),
        ]

    def calibrate(self, question: PlanQuestion, path: Path) -> tuple[TopologySpec, RenderableType]:
        """Measure the ranks of the topology on this machine."""
        from recd_plugin_flexshard.planning.calibration_file import calibrate_tiers

        question.say("measuring collectives, and memory of a few training steps")
        spec, calibration = calibrate_tiers(_registry(question), question.spec, path)
        return spec, calibration.table()

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        """Read the data where no profile is named, and choose tiers."""
        from recd_plugin_flexshard.planning.report_plot import plot
        from recd_plugin_flexshard.planning.report_text import render
        from recd_plugin_flexshard.planning.tier_study import study_tiers

        question.say("reading the data")
        report = study_tiers(
            _registry(question),
            question.topology,
            question.spec,
            what_if={name: each for name, each in question.options.items() if each is not None},
            say=question.say,
        )
        return PlanAnswer(render(report), report.as_json, partial(plot, report))


def _registry(question: PlanQuestion) -> RunConfig:
    return question.registry.with_training({"batch_size": question.batch_size})
