"""Implements ``recd plan --cache``, which chooses how many rows of each table to cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from recd_plugins.api import plan_modes, text_utils


class _Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return text_utils.read_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class CachePlanMode(plan_modes.PlanMode):
    """Mode ``--cache`` of ``recd plan``, which chooses how many rows of each table to cache."""

    flag = "--cache"
    help = (
        "Show how many rows of each table to cache, and the remaining traffic between cache and "
        "backing store."
    )
    takes_auto = True

    def options(self) -> Sequence[click.Option]:
        return [
            click.Option(
                ["--memory"],
                type=_Bytes(),
                help=(
                    "total cache memory over all ranks, such as 256MB. With --batch-size auto it "
                    "also holds the batch. Default: enough for every useful row."
                ),
            ),
            click.Option(
                ["--sample-bytes"],
                type=_Bytes(),
                help="memory per sample for --batch-size auto. Estimated by default.",
            ),
            click.Option(
                ["--profile"],
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="access profile to use instead of counting row reads.",
            ),
        ]

    def check(self, options: Mapping[str, Any], auto: bool) -> None:
        if auto and options["memory"] is None:
            raise click.UsageError(
                "--cache --batch-size auto divides the memory in --memory between cached rows and "
                "the batch. Set --memory, such as --memory 16GiB."
            )

    def plan(self, question: plan_modes.PlanQuestion) -> plan_modes.PlanAnswer:
        from recd_plugin_scars.planning.study import render, study_caches

        question.say("reading the data")
        report = study_caches(
            question.registry,
            question.topology,
            question.spec,
            question.say,
            batch_size=question.batch_size,
            memory=question.options["memory"],
            sample_bytes=question.options["sample_bytes"],
            profile=question.options["profile"],
        )
        return plan_modes.PlanAnswer(render(report), report.as_json)
