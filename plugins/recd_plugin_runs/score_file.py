"""A file of scores that grows batch by batch and is there when it is whole."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recd_plugin_runs.score_format import ROW
from recd_plugins.api import (
    DataError,
    ParquetTable,
    Piece,
    RecdError,
    Rows,
    Storage,
    concat_rows,
    finite,
    is_list_dict,
    new_file,
    slice_rows,
    sparse_column,
)


class ScoreWriter(ABC):
    """Takes batches of one schema."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""


@contextmanager
def score_file(
    path: Path, kind: str, schema: pa.Schema, *, token: str = "", replaces: bool = True
) -> Iterator[ScoreWriter]:
    """A writer of ``path``, which is there at the end, whole, and not before.

    Args:
        path: the file.
        kind: its format.
        schema: of its rows.
        token: as ``new_file`` takes it.
        replaces: likewise.

    Raises:
        RecdError: the place cannot be written, or the format has no such columns.
    """
    nested = [field.name for field in schema if pa.types.is_nested(field.type)]
    if kind == "csv" and nested:
        raise RecdError(
            f"{path}: CSV has no column of lists, which {nested[0]} is; write .parquet or .jsonl"
        )
    binary = [field.name for field in schema if _has_bytes(field.type)]
    if kind == "jsonl" and binary:
        raise RecdError(f"{path}: JSON has no bytes, which {binary[0]} is; write .parquet")
    with new_file(path, token=token, replaces=replaces) as temporary:
        made = (
            _JsonLines(temporary, path)
            if kind == "jsonl"
            else _Arrow(temporary, path, kind, schema)
        )
        try:
            yield made
        finally:
            made.close()


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _has_bytes(kind.value_type)
    if pa.types.is_nested(kind):
        return any(_has_bytes(kind.field(number).type) for number in range(kind.num_fields))
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


class _Arrow(ScoreWriter):
    def __init__(self, path: Path, named: Path, kind: str, schema: pa.Schema) -> None:
        self._named, self._kind = named, kind
        make = pq.ParquetWriter if kind == "parquet" else pyarrow.csv.CSVWriter
        with self._told():
            self._writer = make(path, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        with self._told():
            self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except pa.ArrowException as error:
            raise RecdError(
                f"{self._named}: a column has values that {self._kind} does not take ({error}); "
                "write .parquet"
            ) from error


class _JsonLines(ScoreWriter):
    def __init__(self, path: Path, named: Path) -> None:
        self._named = named
        self._file = path.open("w", encoding="utf-8")

    def write(self, batch: pa.RecordBatch) -> None:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError, LookupError) as error:
            # A time with nanoseconds, of the year 10000, or of a zone that this machine lacks.
            raise RecdError(
                f"{self._named}: a column has values that Python does not take ({error}); write "
                ".parquet"
            ) from error
        for row in rows:
            # Dates, times and decimals as text.
            text = json.dumps(finite(row), default=str, ensure_ascii=False, allow_nan=False)
            self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()


class KeptColumns:
    """Takes columns of a table row by row, in stored order.

    Args:
        location: of a Parquet file or a folder of some.
        columns: their names; of a struct's field with a dot, ``geo.lat``.
        storage: how the store of a URL is reached.

    Raises:
        DataError: it is no Parquet table, or lacks one of the columns.
        SetupError: the store cannot be reached, or refuses.
    """

    def __init__(
        self, location: str, columns: Sequence[str], storage: Storage | None = None
    ) -> None:
        self._location = location
        try:
            table = ParquetTable(location if "://" in location else Path(location), storage)
        except DataError as error:
            raise DataError(
                f"--keep {' --keep '.join(columns)}: columns are kept of Parquet, and {location} "
                f"cannot be read as that ({error}); write it as Parquet, or leave out --keep and "
                f"join by column {ROW} of the scores, its rows from 0"
            ) from error
        self._paths: dict[str, tuple[str, ...]] = {}
        for name in columns:
            if (path := _path(table.schema, name)) is None:
                raise DataError(
                    f"{location}: no column {name}, which --keep names; there are: "
                    f"{', '.join(table.schema.names)}"
                )
            self._paths[name] = path
        read = dict.fromkeys(column for column, *_ in self._paths.values())
        schema = pa.schema([table.schema.field(column) for column in read])
        pieces = (Piece(unit, 0, unit.num_rows) for unit in table.units)
        self._parts: Iterator[Rows] = table.read(pieces, schema)
        self._rest: Rows | None = None
        self._next_row = 0

    def take(self, rows: NDArray[Any]) -> dict[str, pa.Array]:
        """Rows by their numbers in the table, the next ones; of none columns have no type.

        Raises:
            DataError: they are other rows, or there are fewer.
        """
        taken: list[Rows] = []
        num_rows = len(rows)
        if not np.array_equal(rows, np.arange(self._next_row, self._next_row + num_rows)):
            raise self._other_rows("other")
        self._next_row += num_rows
        while num_rows:
            part = self._next()
            if part is None:
                raise self._other_rows("fewer")
            taken.append(slice_rows(part, 0, num_rows))
            num_rows -= len(taken[-1])
            left = len(part) - len(taken[-1])
            self._rest = slice_rows(part, len(taken[-1]), left) if left else None
        if not taken:
            return {name: pa.nulls(0) for name in self._paths}
        kept = concat_rows(taken)
        return {
            name: pc.struct_field(kept.data.column(column), fields) if fields else _of(kept, column)
            for name, (column, *fields) in self._paths.items()
        }

    def check_end(self) -> None:
        """Refuse rows that nobody took."""
        if self._next() is not None:
            raise self._other_rows("more")

    def _next(self) -> Rows | None:
        part, self._rest = self._rest, None
        return next((each for each in self._parts if len(each)), None) if part is None else part

    def _other_rows(self, which: str) -> DataError:
        return DataError(
            f"{self._location}: has {which} rows in files *.parquet than there are scores, as a "
            "dataset may have that makes several of one, or reads files of other names; leave out "
            "--keep, and join by the keys"
        )


def _of(rows: Rows, column: str) -> pa.Array:
    """A column as it is, but for lists that are stored as bytes (layout ``list_dict``)."""
    if not is_list_dict(rows.data.schema.field(column)):
        return rows.data.column(column)
    ids, offsets = sparse_column(rows, column)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))


def _path(schema: pa.Schema, name: str) -> tuple[str, ...] | None:
    """The column of this name, or the one whose field it is; None where there is neither."""
    if name in schema.names:
        return (name,)
    column, *fields = name.split(".")
    if column not in schema.names:
        return None
    kind = schema.field(column).type
    for field in fields:
        if not pa.types.is_struct(kind) or kind.get_field_index(field) < 0:
            return None
        kind = kind.field(field).type
    return (column, *fields)
