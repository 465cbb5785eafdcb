"""Implements ``recd plan --cache``: how many rows of each table to cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recd_plugins.api import PlanAnswer, PlanMode, PlanQuestion, cli_options, text_utils

if TYPE_CHECKING:
    pass


class _Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return text_utils.read_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _RowsOrAll(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "N|all"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        return "all" if value == "all" else cli_options.AT_LEAST_1.convert(value, param, ctx)


class CachePlanMode(PlanMode):
    """Plan mode ``recd plan --cache``."""

    flag = "--cache"
    help = (
        "Plan caches instead: how many rows of each table to keep in fast memory, and what is then "
        "moved."
    )
    takes_auto = True

    def options(self) -> Sequence[click.Option]:
        return [
            click.Option(
                ["--memory"],
                type=_Bytes(),
                help=(
                    "fast memory over all ranks, such as 256MB, for cached rows (and the "
                    "batch with --batch-size auto). By default rows are cached while that "
                    "saves time."
                ),
            ),
            click.Option(
                ["--largest-batch"],
                type=cli_options.AT_LEAST_1,
                help="with --batch-size auto, the maximum rows per rank. Default: 65536.",
            ),
            click.Option(
                ["--sample-bytes"],
                type=_Bytes(),
                help="with --batch-size auto, the memory per sample, instead of an estimate.",
            ),
            click.Option(
                ["--profile"],
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="an access profile, instead of counting the reads of the data.",
            ),
            click.Option(
                ["--profile-rows"],
                type=_RowsOrAll(),
                help="rows of the training split whose reads are counted. Default: 65536.",
            ),
            click.Option(
                ["--steps"],
                type=cli_options.AT_LEAST_1,
                help=(
                    "cache only rows that are read more than once in so many steps. Default: 10000."
                ),
            ),
            click.Option(
                ["--no-lookahead", "lookahead"],
                flag_value=False,
                default=None,
                help="fetch rows when their batch begins, not one batch earlier.",
            ),
        ]

    def check(self, options: Mapping[str, Any], auto: bool) -> None:
        if auto and options["memory"] is None:
            raise click.UsageError(
                "--cache --batch-size auto weighs cached rows against the batch in some memory: "
                "say how much with --memory, as 16GiB"
            )

    def plan(self, question: PlanQuestion) -> PlanAnswer:
        from recd_plugin_scars.planning.study import CacheQuestion, render, study_caches

        options = {name: each for name, each in question.options.items() if each is not None}
        if options.get("profile_rows") == "all":
            options["profile_rows"] = None
        question.say("reading the data")
        report = study_caches(
            question.registry,
            question.topology,
            question.spec,
            CacheQuestion(batch_size=question.batch_size, **options),
            question.say,
        )
        return PlanAnswer(render(report), report.as_json)
