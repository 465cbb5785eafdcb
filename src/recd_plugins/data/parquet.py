"""Reading a table of Parquet files row group by row group."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from recd_plugins.data.list_dict import decoded_field, is_list_dict
from recd_plugins.data.read_plan import Piece, Unit
from recd_plugins.errors import DataError
from recd_plugins.interfaces import Origin, Rows

# Rows decoded at once: more costs page faults, less costs calls.
_DECODE_ROWS = 2048
# With dictionaries, which are built anew for every batch: whole row groups, if they are not huge.
_DECODE_DICTIONARY_ROWS = 16_384


class ParquetTable:
    """One table: a Parquet file, or every ``*.parquet`` below a folder in the order of the names.

    Names that start with ``_`` or ``.`` are left out. Folders may be Hive partitions; what their
    names say is no column. Features in layout ``list_dict`` come as dictionaries of their values.

    Raises:
        DataError: there is no such file, one is not Parquet, or two differ in their columns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _find(path)
        metadata = [read_metadata(file) for file in self.files]
        self.schema = _schema(metadata[0])
        for file, found in zip(self.files, metadata, strict=True):
            self._check_same(file, _schema(found))
        self.units = tuple(
            unit for number, found in enumerate(metadata) for unit in _units(number, found)
        )

    def identity(self) -> list[list[str | int]]:
        """Path below the table's, and rows of each row group, of every file; JSON values."""
        root = self.path if self.path.is_dir() else self.path.parent
        return [
            [
                file.relative_to(root).as_posix(),
                *(unit.num_rows for unit in self.units if unit.file == number),
            ]
            for number, file in enumerate(self.files)
        ]

    def read(self, pieces: Iterable[Piece], schema: pa.Schema) -> Generator[Rows, None, None]:
        """The rows of ``pieces`` with the columns and types of ``schema``.

        A file is open from the first to the last of the pieces of it that follow each other, and
        for this iterator alone: nothing outlives it, nothing is shared between threads.

        Raises:
            DataError: a file cannot be decoded or was replaced after this table was made, or a
                value does not fit its type.
        """
        for number, run in groupby(pieces, key=lambda piece: piece.unit.file):
            with _open(self.files[number], schema) as file:
                for _, adjacent in groupby(run, key=lambda piece: piece.unit):
                    yield from self._read_unit(file, list(adjacent), schema)

    def _read_unit(
        self, file: pq.ParquetFile, pieces: Sequence[Piece], schema: pa.Schema
    ) -> Iterator[Rows]:
        """Pieces of one unit, in order; decoded in one pass."""
        unit = pieces[0].unit
        path = self.files[unit.file]
        if _rows_of(file.metadata, unit.group) != unit.num_rows:
            raise DataError(f"{path} was replaced while it was in use; start anew")
        row, stop = 0, pieces[-1].skip + pieces[-1].num_rows
        try:
            for batch in file.iter_batches(
                _DECODE_DICTIONARY_ROWS if _dictionaries(schema) else _DECODE_ROWS,
                row_groups=[unit.group],
                columns=schema.names,
                use_threads=False,
            ):
                for piece in pieces:
                    first = max(row, piece.skip)
                    last = min(row + batch.num_rows, piece.skip + piece.num_rows)
                    if first < last:
                        data = batch.slice(first - row, last - first)
                        origin = Origin(str(path), unit.first_row + first, last - first)
                        yield Rows(_cast(data, schema, origin), (origin,))
                row += batch.num_rows
                if row >= stop:
                    return
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: row group {unit.group} cannot be read: {error}") from error

    def _check_same(self, file: Path, schema: pa.Schema) -> None:
        first = self.schema
        for name in dict.fromkeys([*first.names, *schema.names]):
            types = [
                _kind(each.field(name)) if name in each.names else "missing"
                for each in (first, schema)
            ]
            if types[0] != types[1]:
                raise DataError(
                    f"files of one table differ: column {name} is {types[0]} in {self.files[0]} "
                    f"and {types[1]} in {file}"
                )


def read_metadata(path: Path) -> pq.FileMetaData:
    """The footer of a file.

    Raises:
        DataError: it is no Parquet file.
    """
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: no readable Parquet file: {error}") from error


def _kind(field: pa.Field) -> str:
    """The type in words. Whether lists can hold nulls makes no difference."""
    if is_list_dict(field):
        return "list_dict"
    return f"list<{field.type.value_type}>" if pt.is_list(field.type) else str(field.type)


def _find(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    files = sorted(
        file
        for file in path.rglob("*.parquet")
        if file.is_file()
        and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"{path}: no *.parquet file in this folder")
    return files


def _open(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(
            path, read_dictionary=_dictionaries(schema), page_checksum_verification=True
        )
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: no readable Parquet file: {error}") from error


def _schema(metadata: pq.FileMetaData) -> pa.Schema:
    """Columns as they are handed out."""
    return pa.schema([decoded_field(field) for field in metadata.schema.to_arrow_schema()])


def _dictionaries(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if is_list_dict(field)]


def _rows_of(metadata: pq.FileMetaData, group: int) -> int:
    return metadata.row_group(group).num_rows if group < metadata.num_row_groups else 0


def _units(number: int, metadata: pq.FileMetaData) -> Iterator[Unit]:
    first_row = 0
    for group in range(metadata.num_row_groups):
        num_rows = metadata.row_group(group).num_rows
        if num_rows:
            yield Unit(number, group, first_row, num_rows)
        first_row += num_rows


def _cast(data: pa.RecordBatch, schema: pa.Schema, origin: Origin) -> pa.RecordBatch:
    # Projection keeps the order of the file.
    columns: Sequence[pa.Array] = [data.column(name) for name in schema.names]
    cast = []
    for field, column in zip(schema, columns, strict=True):
        try:
            cast.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{origin.path}: column {field.name}, rows {origin.first_row} to "
                f"{origin.first_row + origin.num_rows - 1}: {error}"
            ) from error
    return pa.record_batch(cast, schema=schema)
