"""``recd logs write``: rows of a table or a dataset into a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from recd_plugin_recd.logs.damage import Report
from recd_plugin_recd.logs.data_errors import naming_files, naming_source
from recd_plugin_recd.logs.log_writer import LogSettings, LogWriter
from recd_plugin_recd.source import SessionTable, open_source
from recd_plugins.api import DataError, Rows
from recd_plugins.api.columns import broken_list
from recd_plugins.api.files import real_path, scratch_folder
from recd_plugins.api.tables import is_list_dict, to_lists


def open_rows(
    path: Path, session: str | None, plugins_dir: Path | None, default: str = "session_id"
) -> SessionTable:
    """A table with a column of the session, or a registry's dataset, which knows its own."""
    if path.suffix in (".yaml", ".yml"):
        return open_source(path, session=session, plugins_dir=plugins_dir)
    # A log needs no time: its rows stay in the order in which they come.
    session = session or default
    return open_source(path, session=session, timestamp=session, plugins_dir=plugins_dir)


def log_schema(source: SessionTable) -> pa.Schema:
    """The columns of a source as a log has them: features as lists, no metadata of the table."""
    return pa.schema(
        [
            pa.field(field.name, pa.list_(pa.int64()), field.nullable)
            if is_list_dict(field)
            else field
            for field in source.schema
        ]
    )


def each_batch(
    source: SessionTable, schema: pa.Schema, write: Callable[[pa.RecordBatch], None]
) -> None:
    """Hand all rows of a source to ``write``, with the columns of ``log_schema``.

    Raises:
        DataError: a row cannot be written; names its file.
    """
    for partition in source.partitions:
        for rows in source.read(partition):
            columns = [
                _as_lists(rows, field.name) if is_list_dict(field) else column
                for field, column in zip(rows.data.schema, rows.data.columns, strict=True)
            ]
            with naming_files(rows):
                write(pa.record_batch(columns, schema=schema))


def _as_lists(rows: Rows, name: str) -> pa.Array:
    try:
        return to_lists(rows.data.column(name))
    except ValueError as error:
        raise broken_list(rows, name) from error


def write_log(
    source: SessionTable,
    folder: Path,
    settings: LogSettings,
    *,
    append: bool,
    report: Report,
    progress: Callable[[int], None],
) -> LogWriter:
    """Write every row of ``source`` to the log in ``folder``.

    A new log appears when it is complete. Rows appended to a log appear block by block.

    Returns:
        The writer, closed, for what it counted.

    Raises:
        DataError: the folder exists and ``append`` is not given, or the rows do not fit the log.
    """
    if folder.exists() and not append and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"{folder} exists already; --append adds to it")
    schema = log_schema(source)
    written = 0

    def write(batch: pa.RecordBatch) -> None:
        nonlocal written
        log.write(batch)
        written += batch.num_rows
        progress(batch.num_rows)

    with naming_source(source.path), _place(folder, append) as place:
        try:
            with LogWriter(place, schema, settings, report) as log:
                each_batch(source, schema, write)
        except DataError as error:
            if append and written:
                raise DataError(
                    f"{error}\n{folder}: up to {written} rows were appended before that"
                ) from error
            raise
    return log


@contextmanager
def _place(folder: Path, append: bool) -> Iterator[Path]:
    """Where to write: in ``folder``, or in a hidden one that becomes it at the end."""
    if append:
        yield folder
        return
    with scratch_folder(folder) as scratch:
        new = scratch / folder.name
        yield new
        try:
            new.rename(real_path(folder))
        except OSError as error:
            raise DataError(f"{folder}: cannot be written ({error.strerror})") from error
