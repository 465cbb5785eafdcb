"""The command ``recd cluster``, which sorts a table by session and time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recd_plugin_recd import command_options
from recd_plugins.api import cli_options, file_utils, progress_bars, text_utils

if TYPE_CHECKING:
    from recd_plugin_recd.cluster.sort import Progress


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    try:
        return text_utils.read_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument(
    "target",
    type=cli_options.OUTPUT_FOLDER,
    metavar="DST",
    callback=cli_options.new_place,
)
@command_options.session
@command_options.timestamp
@click.option(
    "--memory",
    metavar="SIZE",
    callback=_size,
    default="2GB",
    show_default=True,
    help="Maximum memory of the process, such as 512MB.",
)
@click.option(
    "--layout",
    type=click.Choice(["list", "list_dict"]),
    default="list",
    show_default=True,
    help="Storage of id lists. list: one list per row. list_dict: each distinct list once per row "
    "group.",
)
@command_options.row_group_rows
@command_options.nulls
@click.option(
    "--downsample-sessions",
    "keep_share",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Fraction of sessions to write. Each session is complete or absent.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed for the selection of --downsample-sessions.",
)
@click.option(
    "--engine",
    type=click.Choice(["embedded", "spark"]),
    default="embedded",
    show_default=True,
    help='Sort engine. spark needs Java and pip install "recd-plugins[spark]".',
)
@command_options.force
@command_options.figures
@click.pass_obj
def cluster(
    plugins_dir: Path | None,
    /,
    source: Path,
    target: Path,
    force: bool,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Sort the rows of SRC by session and time into the Parquet table DST.

    SRC is any table that recd init accepts, or a registry file. Other formats than Parquet are
    imported first: DST has ids as lists of int64, and the columns _session and _time. Partitions
    (dt=.../hour=...) of Parquet tables are sorted separately. If the command is killed, run it
    again to resume.
    """
    # Imported lazily: `recd --help` loads this module and does not need Arrow.
    from recd_plugin_recd.cluster import job
    from recd_plugin_recd.imported_tables import open_any

    with progress_bars.progress_bars() as add_bar:

        def start(num_rows: int | None) -> Progress:
            read_bar, write_bar = (add_bar(verb, num_rows) for verb in ("reading", "writing"))

            def advance(read: int, written: int) -> None:
                read_bar(read)
                write_bar(written)

            return advance

        report = job.cluster(
            job.ClusterOptions(source, target, **options),
            force=force,
            plugins_dir=plugins_dir,
            open_table=open_any,
            start=start,
            say=lambda line: click.echo(line, err=True),
        )
    click.echo(report)
    if json_path is not None:
        file_utils.write_json(json_path, asdict(report))
