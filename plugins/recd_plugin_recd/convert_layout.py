"""``recd convert-layout``: rewrites a table in another layout, with its rows in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recd_plugin_recd import command_options
from recd_plugins.api import DataError, cli_options, file_utils, progress_bars, text_utils

if TYPE_CHECKING:
    from recd_plugins.api import list_dict, parquet_writer


@dataclass(frozen=True)
class Conversion:
    """Options of a conversion.

    Attributes:
        source: a Parquet file or a folder of them.
        target: a file or a folder, like the source. Files and subfolders keep their names.
        layout: of the features.
        session, timestamp: columns of the source.
        row_group_rows: most rows of a row group.
        compression_level: zstd compression level.
        nulls: how to handle a null instead of a list.
        popularity: path of a JSON object with the read count of each feature. Sets the column
            order.
    """

    source: Path
    target: Path
    layout: list_dict.Layout
    session: str = "session_id"
    timestamp: str = "ts"
    row_group_rows: int = 8192
    compression_level: int = 3
    nulls: parquet_writer.Nulls = "error"
    popularity: Path | None = None


@dataclass(frozen=True)
class ConvertedTable:
    """Summary of a conversion: rows, layout by feature, bytes before and after."""

    rows: int
    layouts: dict[str, list_dict.Layout]
    source_bytes: int
    target_bytes: int


def convert(
    conversion: Conversion, *, force: bool, start: Callable[[int], Callable[[int], None]]
) -> ConvertedTable:
    """Convert the source and write ``target``, which appears only once it is complete.

    Args:
        conversion: source, target and layout.
        force: replace a target that is a table.
        start: called with the total number of rows. Returns a callback that receives the number of
            newly written rows.
    """
    from recd_plugin_recd.sessions import ParquetSource, check_target
    from recd_plugins.api import Piece, folders, parquet, parquet_writer

    source, target = conversion.source, conversion.target
    check_target(source, target, force)
    source_table = ParquetSource(source, conversion.session, conversion.timestamp)
    table = source_table.table
    popularity: Sequence[str] = ()
    if conversion.popularity is not None:
        popularity = read_popularity(conversion.popularity, source_table.features)
    progress = start(source_table.num_rows or 0)
    with folders.scratch_folder(target) as scratch:
        new = scratch / "table" / target.name
        layouts: list_dict.Layout | dict[str, list_dict.Layout] = conversion.layout
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
                row_group_rows=conversion.row_group_rows,
                popularity=popularity,
                metadata={key: each for key, each in metadata.items() if key != b"ARROW:schema"},
                nulls=conversion.nulls,
                compression_level=conversion.compression_level,
                source=file,
            ) as writer:
                units = (unit for unit in table.units if unit.file == number)
                pieces = (Piece(unit, 0, unit.num_rows) for unit in units)
                for rows in table.read(pieces, table.schema):
                    writer.write(rows.data)
                    progress(len(rows))
            layouts = writer.layouts
        files = [new] if source.is_file() else new.rglob("*.parquet")
        written = sum(file.stat().st_size for file in files)
        folders.put(new, target, scratch)
    assert not isinstance(layouts, str), "there is at least one file"
    before = sum(file.stat().st_size for file in table.files)
    return ConvertedTable(source_table.num_rows or 0, layouts, before, written)


def read_popularity(path: Path, features: Sequence[str]) -> tuple[str, ...]:
    """Return the features in a JSON object ``{"feature": count}``, most frequently read first."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
        order = sorted(counts, key=lambda name: -counts[name])
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: no JSON object of features and counts: {error}") from error
    for name in order:
        if name not in features:
            raise DataError(
                f"{path}: the table has no feature {name}{text_utils.did_you_mean(name, features)}"
            )
    return tuple(order)


@click.command("convert-layout")
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument(
    "target", type=cli_options.OUTPUT_PATH, metavar="DST", callback=cli_options.new_place
)
@click.option(
    "--layout",
    type=click.Choice(["list", "list_dict"]),
    required=True,
    help="How to store lists of ids: one list per row, or each distinct list once per row group.",
)
@click.option("--session", default="session_id", show_default=True, help="Session column.")
@click.option("--timestamp", default="ts", show_default=True, help="Time column.")
@command_options.row_group_rows
@click.option(
    "--compression-level",
    type=click.IntRange(1, 19),
    default=3,
    show_default=True,
    help="zstd compression level. 9 saves a few percent and takes several times longer.",
)
@click.option(
    "--popularity",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON object with the read count of each feature. Sets the column order.",
)
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
    """Write the table SRC with its lists in another layout as DST.

    SRC is a Parquet file or a folder of them; DST is of the same type. The order of rows, file
    names and metadata do not change. With list_dict, features that rarely repeat stay plain lists.
    """
    conversion = Conversion(source, target, layout, **options)
    with progress_bars.progress_bars() as add_bar:
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
        file_utils.write_json(json_path, asdict(done))
