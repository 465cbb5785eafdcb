"""The command ``recd generate``, which generates tables of user sessions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Self, get_args

import click
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from recd_plugins.api import DataError, cli_options, file_utils, folders, progress_bars

ShapeName = Literal["papercal", "rm1", "rm2", "rm3"]
Layout = Literal["clustered", "interleaved", "stream"]
#: Key of the Parquet metadata that stores the generation options as JSON.
PROVENANCE = b"recd.papercal"


class TableOptions(BaseModel):
    """Options of a generated table. Equal options generate equal rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: PositiveInt = Field(description="Number of rows.")
    seed: int = Field(default=0, ge=0, description="Seed of the random generator.")
    layout: Layout = Field(
        default="clustered",
        description="Order of rows. clustered: one session after another. interleaved: the same "
        "rows by time. stream: part of a log with many overlapping sessions, by time.",
    )
    row_group_rows: PositiveInt = Field(
        default=2048, description="Number of rows per Parquet row group."
    )
    files: PositiveInt = Field(default=1, description="Number of Parquet files in the folder.")
    shape: ShapeName = Field(
        default="papercal",
        description="Features: papercal, or model rm1, rm2 or rm3 (RecD paper, section 6.1).",
    )
    scale: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Scale of rm1, rm2 and rm3. A smaller scale shortens lists.",
    )

    @model_validator(mode="after")
    def _papercal_has_one_size(self) -> Self:
        if self.shape == "papercal" and self.scale != 1:
            raise ValueError(
                "option 'scale' applies only to the shapes 'rm1', 'rm2' and 'rm3'. Remove this "
                "option for the shape 'papercal'."
            )
        return self


def write_table(
    folder: Path, options: TableOptions, progress: Callable[[int], None] = lambda _rows: None
) -> None:
    """Generate a table of user sessions as Parquet files in the new folder ``folder``.

    The folder is created atomically, when all rows are written.

    Args:
        folder: folder to create.
        options: size and content of the table.
        progress: called with the number of rows written since the last call.

    Raises:
        DataError: the folder exists, or there are too few rows for the number of files.
    """
    from recd_plugin_recd import papercal

    _check_free(folder)
    rows_a_file = -(-options.rows // options.files)
    rows_a_file += -rows_a_file % options.row_group_rows
    if (options.files - 1) * rows_a_file >= options.rows:
        raise DataError(
            f"{folder}: {options.rows} rows in row groups of {options.row_group_rows} are too few "
            f"for {options.files} files. Reduce 'files' or 'row_group_rows'."
        )
    with folders.scratch_folder(folder) as scratch:
        new = scratch / folder.name
        new.mkdir()
        keys = papercal.row_keys(options.rows, options.seed, options.layout)
        row_groups = papercal.chunks(keys, options.row_group_rows)
        for number in range(options.files):
            path = new / f"part-{number:05d}.parquet"
            _write_file(path, options, row_groups, rows_a_file, progress)
        try:
            os.replace(new, file_utils.real_path(folder))
        except OSError:
            # Another process may have finished first.
            _check_free(folder)
            raise


def provenance(folder: Path) -> dict[str, Any] | None:
    """Return the options of a generated table. None if ``recd generate`` did not write it."""
    try:
        metadata = pq.read_schema(folder / "part-00000.parquet").metadata or {}
        found = file_utils.parse_json(metadata.get(PROVENANCE, b"null"))
    except (ValueError, OSError):  # Arrow raises ValueError for damaged files.
        return None
    return found if isinstance(found, dict) else None


def provenance_of(options: TableOptions) -> dict[str, Any]:
    """Return the value that ``provenance`` returns for a table with these options."""
    from recd_plugin_recd import papercal

    # For PAPERCAL, keep the provenance format from before other shapes existed.
    unsaid = {"shape", "scale"} if options.shape == "papercal" else set()
    return {"version": papercal.VERSION, **options.model_dump(exclude=unsaid)}


def _check_free(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(
            f"{folder} exists already. Use another folder, or replace a generated table with "
            "--force."
        )


def _write_file(
    path: Path,
    options: TableOptions,
    row_groups: Iterator[Any],
    num_rows: int,
    progress: Callable[[int], None],
) -> None:
    from recd_plugin_recd import papercal
    from recd_plugin_recd.papercal import shape_of

    shape = shape_of(options.shape, options.scale)
    schema = shape.schema.with_metadata({PROVENANCE: json.dumps(provenance_of(options))})
    # A dictionary over ids makes clustered lists larger; zstd finds the repeats by itself.
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=3, use_dictionary=False
    ) as writer:
        for _ in range(num_rows // options.row_group_rows):
            keys = next(row_groups, None)
            if keys is None:
                return
            batch = papercal.make_rows(keys, shape).replace_schema_metadata(schema.metadata)
            writer.write_batch(batch, row_group_size=options.row_group_rows)
            progress(len(keys))


def _option(name: str, type: click.ParamType[Any], **default: Any) -> Any:
    field = TableOptions.model_fields[name]
    default = default or {"default": field.default}
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=type, show_default=True, help=field.description, **default)


@click.command()
@click.argument("folder", type=cli_options.OUTPUT_FOLDER, callback=cli_options.new_place)
@_option("rows", cli_options.AT_LEAST_1, default=65_536)
@_option("shape", click.Choice(get_args(ShapeName)))
@_option("scale", click.FloatRange(min=0, max=1, min_open=True))
@_option("layout", click.Choice(get_args(Layout)))
@_option("seed", cli_options.COUNT_FROM_0)
@_option("row_group_rows", cli_options.AT_LEAST_1)
@_option("files", cli_options.AT_LEAST_1)
@click.option("--force", is_flag=True, help="Replace FOLDER if it is a generated table.")
def generate(folder: Path, force: bool, **options: Any) -> None:
    """Generate a table of user sessions as Parquet files in FOLDER.

    In the default shape, papercal, values repeat as often as in the RecD paper. 65,536 clustered
    rows take about 70 MB.
    """
    if options["shape"] == "papercal" and options["scale"] != 1:
        raise click.UsageError(
            "--scale applies only to --shape rm1, rm2 and rm3. Remove --scale for papercal."
        )
    table = TableOptions.model_validate(options)
    with progress_bars.row_progress(f"generating {folder.name}", table.rows) as advance:
        if not (force and folder.exists()):
            write_table(folder, table, advance)
        elif provenance(folder) is None:
            raise DataError(
                f"--force cannot replace {folder}, because recd generate did not create it. Remove "
                "the folder yourself, or use another folder."
            )
        else:
            with folders.scratch_folder(folder) as scratch:
                new = scratch / "new" / folder.name
                write_table(new, table, advance)
                folders.put(new, folder, scratch)
    size = sum(file.stat().st_size for file in folder.iterdir())
    click.echo(f"{folder}: {table.rows:,} rows, {table.layout}, {size / 1e6:.1f} MB")
