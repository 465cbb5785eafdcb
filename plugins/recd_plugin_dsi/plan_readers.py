"""``recd plan --readers``: find the number of readers that keeps the trainer busy."""

from __future__ import annotations

from collections.abc import Sequence

import click

from recd_plugins.api import plan_modes


class ReadersPlan(plan_modes.PlanMode):
    """Measures a reader and the trainer, and computes the number of readers per rank."""

    flag = "--readers"
    help = (
        "Measure a reader and the trainer on this machine, and print the required number of "
        "readers."
    )
    takes_topology = False
    because = "measures this machine with the settings of the registry file"

    def options(self) -> Sequence[click.Option]:
        return [
            click.Option(
                ["--stall-target"],
                type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
                metavar="SHARE",
                help="fraction of time that the trainer may wait for data. Default: 0.05.",
            )
        ]

    def plan(self, question: plan_modes.PlanQuestion) -> plan_modes.PlanAnswer:
        from recd_plugin_dsi.readers_report import render, study_readers
        from recd_plugins.api import stall_meter

        assert question.batch_size is not None, "--batch-size auto does not work with --readers"
        question.say("preparing the data")
        plan = study_readers(
            question.registry,
            question.plugins_dir,
            question.batch_size,
            question.options["stall_target"] or stall_meter.STALL_TARGET,
            question.say,
        )
        return plan_modes.PlanAnswer(render(plan), plan.as_json)
