"""Score files that grow batch by batch, and columns kept from the scored table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recd_plugin_runs.score_columns import ROW
from recd_plugins.api import (
    DataError,
    ParquetTable,
    Piece,
    Rows,
    Storage,
    concat_rows,
    finite,
    is_list_dict,
    new_file,
    slice_rows,
    sparse_column,
)


class BatchWriter(Protocol):
    """Takes batches of one schema, as pyarrow's writers do."""

    def write_batch(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None: ...


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_batch(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            # Dates, times and decimals as text.
            text = json.dumps(finite(row), default=str, ensure_ascii=False, allow_nan=False)
            self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()


@contextmanager
def score_file(
    path: Path, kind: str, schema: pa.Schema, *, token: str = "", replaces: bool = True
) -> Iterator[BatchWriter]:
    """Open a writer of ``path``, which appears when it is complete; see ``new_file``."""
    with new_file(path, token=token, replaces=replaces) as temporary:
        writer: BatchWriter
        if kind == "jsonl":
            writer = _JsonLines(temporary)
        elif kind == "csv":
            writer = pyarrow.csv.CSVWriter(temporary, schema)
        else:
            writer = pq.ParquetWriter(temporary, schema)
        try:
            yield writer
        finally:
            writer.close()


class KeptColumns:
    """Takes columns of a Parquet table row by row, in stored order.

    Args:
        location: a file or a folder of some.
        columns: their names; a field of a struct with a dot, ``geo.lat``.
        storage: how the store of a URL is reached.
    """

    def __init__(
        self, location: str, columns: Sequence[str], storage: Storage | None = None
    ) -> None:
        self._location = location
        try:
            table = ParquetTable(location if "://" in location else Path(location), storage)
        except DataError as error:
            raise DataError(
                f"--keep: columns are kept of Parquet, and {location} cannot be read as that "
                f"({error}); leave out --keep and join by column {ROW} of the scores"
            ) from error
        there = table.schema.names
        self._paths = {name: [name] if name in there else name.split(".") for name in columns}
        for name, (column, *fields) in self._paths.items():
            kind: Any = table.schema.field(column).type if column in there else None
            for field in fields:
                has = pa.types.is_struct(kind) if kind is not None else False
                kind = kind.field(field).type if has and kind.get_field_index(field) >= 0 else None
            if kind is None:
                raise DataError(
                    f"{location}: no column {name}, which --keep names; there are: "
                    f"{', '.join(there)}"
                )
        read = dict.fromkeys(column for column, *_ in self._paths.values())
        schema = pa.schema([table.schema.field(column) for column in read])
        pieces = (Piece(unit, 0, unit.num_rows) for unit in table.units)
        self._parts = (part for part in table.read(pieces, schema) if len(part))
        self._rest: Rows | None = None
        self._next_row = 0

    def take(self, rows: NDArray[Any]) -> dict[str, pa.Array]:
        """Return the next rows, whose numbers in the table are ``rows``; null columns if none."""
        taken: list[Rows] = []
        num_rows = len(rows)
        if not np.array_equal(rows, np.arange(self._next_row, self._next_row + num_rows)):
            raise self._other_rows("other")
        self._next_row += num_rows
        while num_rows:
            if (part := self._next()) is None:
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
        return next(self._parts, None) if part is None else part

    def _other_rows(self, which: str) -> DataError:
        return DataError(
            f"{self._location}: has {which} rows than there are scores; leave out --keep, and join "
            "by the keys"
        )


def _of(rows: Rows, column: str) -> pa.Array:
    """Return a column, with lists of layout ``list_dict`` decoded."""
    if not is_list_dict(rows.data.schema.field(column)):
        return rows.data.column(column)
    ids, offsets = sparse_column(rows, column)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
