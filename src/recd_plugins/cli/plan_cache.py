"""``recd plan --cache``: how many rows of each table to cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from recd_plugins.byte_sizes import read_bytes
from recd_plugins.cli.options import AT_LEAST_1
from recd_plugins.files import write_json

if TYPE_CHECKING:
    from recd_plugins.planning.topologies import TopologySpec
    from recd_plugins.registry import Registry

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Bytes in words."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """A positive number of bytes."""
        try:
            return read_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _RowsOrAll(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Rows, or ``all``."""

    name = "N|all"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """A positive number, or ``all``."""
        return "all" if value == "all" else AT_LEAST_1.convert(value, param, ctx)


#: Names of the options that are for ``--cache`` alone.
CACHE_OPTIONS = (
    "memory",
    "largest_batch",
    "sample_bytes",
    "profile",
    "profile_rows",
    "steps",
    "lookahead",
)


def cache_options(command: _Command) -> _Command:
    """``--cache``, and what belongs to it."""
    for option in (
        click.option(
            "--no-lookahead",
            "lookahead",
            flag_value=False,
            default=None,
            help="With --cache: rows are fetched when their batch begins, not a batch before.",
        ),
        click.option(
            "--steps",
            type=AT_LEAST_1,
            help="With --cache: a row is worth caching that is read more than once in so many "
            "steps; 10000 without it.",
        ),
        click.option(
            "--profile-rows",
            type=_RowsOrAll(),
            help="With --cache: rows of the training split whose reads are counted; 65536 without "
            "it.",
        ),
        click.option(
            "--profile",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="With --cache: an access profile, in place of counting the reads of the data.",
        ),
        click.option(
            "--sample-bytes",
            type=_Bytes(),
            help="With --cache --batch-size auto: memory that a sample takes, in place of what is "
            "counted.",
        ),
        click.option(
            "--largest-batch",
            type=AT_LEAST_1,
            help="With --cache --batch-size auto: no more rows of a rank than these; 65536 without "
            "it.",
        ),
        click.option(
            "--memory",
            type=_Bytes(),
            help="With --cache: fast memory of all ranks together, as 256MB, for cached rows, and "
            "with --batch-size auto for the batch; without it, what pays is cached.",
        ),
        click.option(
            "--cache",
            is_flag=True,
            help="Plan caches instead: how many rows of each table to keep in fast memory, and "
            "what is then moved.",
        ),
    ):
        command = option(command)
    return command


def check_cache_options(cache: bool, given: dict[str, Any], auto: bool) -> None:
    """Refuse options that would change nothing."""
    options = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    options = ["--no-lookahead" if name == "--lookahead" else name for name in options]
    if options and not cache:
        raise click.UsageError(f"{' and '.join(options)} {_are(options)} for --cache")
    searching = [name for name in options if name in ("--largest-batch", "--sample-bytes")]
    if searching and not auto:
        raise click.UsageError(
            f"{' and '.join(searching)} {_are(searching)} for --cache --batch-size auto"
        )
    if cache and auto and given["memory"] is None:
        raise click.UsageError(
            "--cache --batch-size auto weighs cached rows against the batch in some memory: say "
            "how much with --memory, as 16GiB"
        )


def _are(options: list[str]) -> str:
    return "are" if len(options) > 1 else "is"


def plan_cache(
    registry: Registry,
    plugins_dir: Path | None,
    topology: str,
    spec: TopologySpec,
    batch_size: int | None,
    given: dict[str, Any],
    *,
    json_path: Path | None,
    plot_path: Path | None,
    calibrate_path: Path | None,
) -> None:
    """Measure this machine where asked to, then plan, print and write.

    Args:
        registry: not prepared.
        plugins_dir: of the registry.
        topology: its name; ``spec``: its ranks.
        batch_size: rows of a rank; None searches it.
        given: the options of ``CACHE_OPTIONS``, None where they are not given.
        json_path, plot_path, calibrate_path: what is written, if anything.
    """
    from recd_plugin_scars.planning.report_plot import plot
    from recd_plugin_scars.planning.report_text import render
    from recd_plugin_scars.planning.study import CacheQuestion, study_caches

    progress, console = Console(stderr=True), Console()
    if calibrate_path is not None:
        from recd_plugin_scars.planning.calibrate import calibrate_cache

        with progress.status("training a few steps, and moving rows, to see what they cost"):
            spec, found = calibrate_cache(registry, plugins_dir, spec, calibrate_path)
        console.print(found.text())
    options = {name: value for name, value in given.items() if value is not None}
    if options.get("profile_rows") == "all":
        options["profile_rows"] = None
    with progress.status("reading the data") as status:
        report = study_caches(
            registry, topology, spec, CacheQuestion(batch_size=batch_size, **options), status.update
        )
    console.print(render(report))
    if json_path is not None:
        write_json(json_path, report.as_json())
    if plot_path is not None:
        plot(report, plot_path)
