"""The command ``recd convert-layout``, which changes the storage of id lists in a table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recd_plugin_recd import command_options
from recd_plugins.api import cli_options, file_utils, progress_bars

if TYPE_CHECKING:
    from recd_plugins.api import list_dict, parquet_writer


def convert(
    source: Path,
    target: Path,
    layout: list_dict.Layout,
    *,
    session: str = "session_id",
    timestamp: str = "ts",
    row_group_rows: int = 8192,
    nulls: parquet_writer.Nulls = "error",
    force: bool = False,
    start: Callable[[int], Callable[[int], None]] = lambda _rows: lambda _written: None,
) -> dict[str, Any]:
    """Write a copy of a table with another storage of id lists.

    ``target`` is created atomically, when all rows are written.

    Args:
        source: a Parquet file or a folder of Parquet files.
        target: a file or a folder, like the source. Files and subfolders keep their names.
        layout: ``list`` stores one list per row, ``list_dict`` each distinct list once per row
            group.
        session, timestamp: session and time columns of the source.
        row_group_rows: maximum number of rows in a row group.
        nulls: whether a null list is an error or becomes an empty list.
        force: whether to replace ``target`` if it is a table.
        start: called with the total number of rows. Returns a function that receives the number of
            newly written rows.

    Returns:
        A dict with ``rows``, ``layouts`` (from feature to layout), ``source_bytes`` and
        ``target_bytes``.
    """
    from recd_plugin_recd.sessions import ParquetSource, check_target
    from recd_plugins.api import folders, parquet, parquet_writer, readers

    check_target(source, target, force)
    source_table = ParquetSource(source, session, timestamp)
    table, rows = source_table.table, source_table.num_rows or 0
    progress = start(rows)
    layouts: list_dict.Layout | dict[str, list_dict.Layout] = layout
    with folders.scratch_folder(target) as scratch:
        new = scratch / "table" / target.name
        # A file with rows comes first because it decides the layouts of all files.
        with_rows = {unit.file for unit in table.units}
        for number in sorted(range(len(table.files)), key=lambda number: number not in with_rows):
            file = table.files[number]
            metadata = parquet.read_metadata(file).metadata or {}
            with parquet_writer.TableWriter(
                new if source.is_file() else new / file.relative_to(source),
                table.schema,
                keys=source_table.keys,
                layout=layouts,
                row_group_rows=row_group_rows,
                metadata={key: each for key, each in metadata.items() if key != b"ARROW:schema"},
                nulls=nulls,
                source=file,
            ) as writer:
                units = (unit for unit in table.units if unit.file == number)
                pieces = (readers.Piece(unit, 0, unit.num_rows) for unit in units)
                for batch in table.read(pieces, table.schema):
                    writer.write(batch.data)
                    progress(len(batch))
            layouts = writer.layouts
        files = [new] if source.is_file() else new.rglob("*.parquet")
        written = sum(file.stat().st_size for file in files)
        folders.put(new, target, scratch)
    before = sum(file.stat().st_size for file in table.files)
    return {
        "rows": rows,
        "layouts": layouts,
        "source_bytes": before,
        "target_bytes": written,
    }


@click.command("convert-layout")
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument(
    "target", type=cli_options.OUTPUT_PATH, metavar="DST", callback=cli_options.new_place
)
@click.option(
    "--layout",
    type=click.Choice(["list", "list_dict"]),
    required=True,
    help="Storage of id lists. list: one list per row. list_dict: each distinct list once per row "
    "group.",
)
@click.option(
    "--session", default="session_id", show_default=True, help="Column of the session id."
)
@click.option("--timestamp", default="ts", show_default=True, help="Column of the time.")
@command_options.row_group_rows
@command_options.nulls
@command_options.force
@command_options.figures
def convert_layout(
    source: Path,
    target: Path,
    layout: list_dict.Layout,
    force: bool,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Write a copy of the table SRC to DST, with lists of ids stored in another layout.

    SRC is a Parquet file or a folder of Parquet files. The order of rows, file names and metadata
    do not change. With list_dict, features whose lists rarely repeat stay plain lists.
    """
    with progress_bars.progress_bars() as add_bar:
        start = partial(add_bar, f"writing {target.name}")
        done = convert(source, target, layout, force=force, start=start, **options)
    click.echo(
        f"{target}: {done['rows']:,} rows, {layout}, {done['target_bytes'] / 1e6:.1f} MB "
        f"(from {done['source_bytes'] / 1e6:.1f} MB)"
    )
    lists = [name for name, chosen in done["layouts"].items() if chosen != layout]
    if lists:
        click.echo(
            f"stored as plain lists, because they rarely repeat: {', '.join(map(repr, lists))}"
        )
    if json_path is not None:
        file_utils.write_json(json_path, done)
