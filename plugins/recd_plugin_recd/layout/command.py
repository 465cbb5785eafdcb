"""``recd convert-layout``: store the lists of a table in another way."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from recd_plugin_recd import command_options
from recd_plugins.api import OUTPUT_PATH, new_place, progress_bars


@click.command("convert-layout")
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument("target", type=OUTPUT_PATH, metavar="DST", callback=new_place)
@click.option(
    "--layout",
    type=click.Choice(["list", "list_dict"]),
    required=True,
    help="How lists of ids are stored: each row's, or each distinct one once in a row group.",
)
@click.option("--session", default="session_id", show_default=True, help="Column of the session.")
@click.option("--timestamp", default="ts", show_default=True, help="Column of the time.")
@command_options.row_group_rows
@click.option(
    "--compression-level",
    type=click.IntRange(1, 19),
    default=3,
    show_default=True,
    help="Of zstd; 9 saves some percent and takes several times longer.",
)
@click.option(
    "--popularity",
    type=click.Path(path_type=Path, dir_okay=False),
    help="How often each feature is read, as JSON or lines FEATURE,COUNT: the order of columns.",
)
@command_options.nulls
@command_options.force
@command_options.figures
def convert_layout(
    source: Path,
    target: Path,
    layout: str,
    session: str,
    timestamp: str,
    row_group_rows: int,
    compression_level: int,
    popularity: Path | None,
    nulls: str,
    force: bool,
    json_path: Path | None,
) -> None:
    """Write the table SRC with its lists in another layout as DST.

    SRC is a Parquet file or a folder of them; DST becomes the same. Rows keep their order, files
    their names and metadata. With list_dict, features that hardly repeat stay lists.
    """
    # Imported here: `recd --help` reads this module and has no use for Arrow.
    from recd_plugin_recd.layout.convert import Conversion
    from recd_plugin_recd.layout.convert import convert_layout as convert
    from recd_plugins.api import write_json

    conversion = Conversion(
        source,
        target,
        layout,  # type: ignore[arg-type]
        session,
        timestamp,
        row_group_rows,
        compression_level,
        nulls,  # type: ignore[arg-type]
        popularity,
    )
    with progress_bars() as add_bar:
        start = partial(add_bar, f"writing {target.name}")
        done = convert(conversion, force=force, start=start)
    click.echo(
        f"{target}: {done.rows:,} rows, {layout}, {done.target_bytes / 1e6:.1f} MB "
        f"(from {done.source_bytes / 1e6:.1f} MB)"
    )
    lists = [name for name, chosen in done.layouts.items() if chosen != layout]
    if lists:
        click.echo(f"lists as before, because they repeat too little: {', '.join(lists)}")
    if json_path is not None:
        write_json(json_path, asdict(done))
