"""Columns of a Parquet table that predictions carry as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_scoring.score_format import ROW
from recd_plugins.api import DataError, Rows
from recd_plugins.api.columns import sparse_column
from recd_plugins.api.reading import Piece, concat_rows, slice_rows
from recd_plugins.api.tables import ParquetTable, Storage, is_list_dict


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
