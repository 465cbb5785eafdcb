"""``recd criteo``: converts Criteo's files, and creates small samples in their format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from recd_plugins.api import cli_options, progress_bars


@click.group()
def criteo() -> None:
    """Convert Criteo's click logs, or create small samples in their format."""


@criteo.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument(
    "target", metavar="DST", type=cli_options.OUTPUT_PATH, callback=cli_options.new_place
)
@click.option(
    "--part-rows",
    type=cli_options.AT_LEAST_1,
    default=1 << 22,
    show_default=True,
    help="Rows per Parquet file. A killed run repeats at most this many rows.",
)
@click.option("--force", is_flag=True, help="Overwrite DST if this command wrote it.")
@click.option("--json", "json_path", type=cli_options.OUTPUT, help="Write statistics to this file.")
def convert(
    source: Path, target: Path, force: bool, json_path: Path | None, **options: Any
) -> None:
    """Convert Criteo's TSV SRC, a file or a folder with day_0, day_1..., to Parquet in DST.

    Also reads .gz and .zst. To resume a killed run, run the same command again.
    """
    from recd_plugin_dlrm.criteo.convert import ConvertOptions
    from recd_plugin_dlrm.criteo.convert import convert as run
    from recd_plugins.api import file_utils

    with progress_bars.progress_bars() as add_bar:
        done = run(
            ConvertOptions(source, target, **options),
            force=force,
            say=lambda line: click.echo(line, err=True),
            start=add_bar,
        )
    size = sum(file.stat().st_size for file in target.rglob("*.parquet"))
    click.echo(f"{target}: {done.rows:,} rows in {done.part} files, {size / 1e6:.1f} MB")
    if json_path is not None:
        file_utils.write_json(json_path, {"rows": done.rows, "files": done.part, "bytes": size})


@criteo.command()
@click.argument("folder", type=cli_options.OUTPUT_FOLDER)
@click.option(
    "--kind",
    type=click.Choice(["terabyte", "kaggle"]),
    default="terabyte",
    show_default=True,
    help="One file per day, or train.txt with all days.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["tsv", "gz", "zst", "npy"]),
    default="tsv",
    show_default=True,
    help="TSV, plain or compressed, or npy files.",
)
@click.option(
    "--rows", type=cli_options.AT_LEAST_1, default=10_000, show_default=True, help="Rows per day."
)
@click.option(
    "--days", type=cli_options.AT_LEAST_1, help="Number of days.  [default: 3; 7 for kaggle]"
)
@click.option("--seed", type=cli_options.COUNT_FROM_0, default=0, show_default=True)
def sample(
    folder: Path, kind: str, file_format: str, rows: int, days: int | None, seed: int
) -> None:
    """Write small files in Criteo's format to FOLDER. Their labels can be learned."""
    from recd_plugin_dlrm.criteo.sample import write_sample

    days = days or (7 if kind == "kaggle" else 3)
    with progress_bars.progress_bars() as add_bar:
        progress = add_bar("writing", rows * days)
        files = write_sample(folder, kind, file_format, rows, days, seed, progress)
    size = sum(file.stat().st_size for file in files)
    click.echo(f"{folder}: {rows * days:,} rows in {len(files)} files, {size / 1e6:.1f} MB")
