"""The command ``recd analyze``, which measures duplicates in a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugin_recd import command_options
from recd_plugins.api import cli_options, consoles, progress_bars

if TYPE_CHECKING:
    from recd_plugin_recd.sessions import Nulls


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--batch-size",
    type=cli_options.AT_LEAST_1,
    help="Rows per training batch.  [default: training.batch_size of a registry file, else 4096]",
)
@command_options.session
@command_options.timestamp
@command_options.label
@click.option(
    "--sample-mb",
    type=cli_options.AT_LEAST_1,
    default=128,
    show_default=True,
    help="Memory in MB for a sample of sessions, to predict the effect of recd cluster.",
)
@command_options.nulls
@click.option(
    "--json",
    "json_path",
    type=cli_options.OUTPUT_OR_TERMINAL,
    help="Write the report to this JSON file. - prints only the JSON.",
)
@click.option(
    "--html",
    "html_path",
    type=cli_options.OUTPUT,
    help="Write the report as an HTML page.",
)
@click.pass_obj
def analyze(
    plugins_dir: Path | None,
    path: Path,
    batch_size: int | None,
    session: str | None,
    timestamp: str | None,
    label: str | None,
    sample_mb: int,
    nulls: Nulls,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Measure how often ids repeat in a table, and recommend features to deduplicate.

    PATH is a table in any format that recd init accepts, or a registry file, whose training data
    is read. Tables without lists of ids are imported first, with the column roles that recd init
    guesses.
    """
    # Imported here: `recd --help` reads this module and has no use for Arrow.
    from recd_plugin_recd.analyze.report import page, show
    from recd_plugin_recd.analyze.study import study
    from recd_plugin_recd.imported_tables import open_any
    from recd_plugins.api import file_utils

    source = open_any(
        path,
        session=session,
        timestamp=timestamp,
        label=label,
        plugins_dir=plugins_dir,
        needs_lists=True,
    )
    with progress_bars.progress_bars() as add_bar:
        report = study(
            source,
            batch_size=batch_size,
            sample_megabytes=sample_mb,
            nulls=nulls,
            progress=add_bar(f"reading {path.name}", source.num_rows),
        )
    if html_path is not None:
        file_utils.write_text(html_path, page(report))
    text = file_utils.json_text(report.to_json())
    if json_path == Path("-"):
        click.echo(text, nl=False)
        return
    if json_path is not None:
        file_utils.write_text(json_path, text)
    show(consoles.output_console(), report)
