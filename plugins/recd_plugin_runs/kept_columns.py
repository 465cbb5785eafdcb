"""Columns of the scored table that ``recd predict --keep`` copies to the score file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugin_runs.score_columns import ROW
from recd_plugins.api import (
    DataError,
    Dataset,
    RecdError,
    Rows,
    Storage,
    arrow,
    list_dict,
    parquet,
    readers,
    row_tables,
)


def check_kept(dataset: Dataset, location: str, columns: Sequence[str]) -> None:
    """Raise an error if columns of a table cannot be copied. Reads no rows.

    Args:
        dataset: the dataset of the run.
        location: the table to score.
        columns: the names given to ``--keep``.
    """
    if not columns:
        return
    own_rows = False
    with suppress(RecdError):  # the training data may be missing
        own_rows = ROW in dataset.keys().values()
    if own_rows:
        raise DataError(
            f"{location}: --keep cannot be used with dataset option 'explode', because a row of "
            f"the table has several scores. Remove --keep, and join the score file on {ROW!r}, the "
            "row of the table, and 'candidate', the position in its lists, both from 0."
        )
    KeptColumns(location, columns, 1, dataset.storage())


class KeptColumns:
    """Reads selected columns, or struct fields by path, of a Parquet table.

    Args:
        location: the table.
        columns: names, or paths of struct fields with dots.
        size: rows to read at a time.
        storage: settings of remote tables.
    """

    def __init__(
        self, location: str, columns: Sequence[str], size: int, storage: Storage | None = None
    ) -> None:
        self._location = location
        try:
            table = parquet.ParquetTable(location if "://" in location else Path(location), storage)
        except DataError as error:
            if "://" in location:
                raise
            raise DataError(
                f"{location}: --keep copies columns of Parquet tables only, and this table is not "
                f"Parquet. Remove --keep, and join the table and the score file on column {ROW!r}. "
                "Or train again with role 'key' for the columns: they are always copied."
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
                    f"{location}: the table has no column {name!r} for --keep. Its columns are "
                    f"{', '.join(map(repr, there))}."
                )
        read = dict.fromkeys(column for column, *_ in self._paths.values())
        schema = pa.schema([table.schema.field(column) for column in read])
        pieces = (readers.Piece(unit, 0, unit.num_rows) for unit in table.units)
        self._parts = row_tables.rebatch(table.read(pieces, schema), size, rest=True)
        self._next_row = 0

    def take(self, rows: NDArray[Any]) -> dict[str, pa.Array]:
        """Return the columns of the next rows by name. Raises DataError if ``rows`` are others."""
        if not len(rows):
            return {name: pa.nulls(0) for name in self._paths}
        kept = next(self._parts, None)
        expected = np.arange(self._next_row, self._next_row + len(rows))
        if kept is None or len(kept) != len(rows) or not np.array_equal(rows, expected):
            raise self._other_rows()
        self._next_row += len(rows)
        return {
            name: pc.struct_field(kept.data.column(column), fields) if fields else _of(kept, column)
            for name, (column, *fields) in self._paths.items()
        }

    def check_end(self) -> None:
        """Raise an error if the table has more rows than were read."""
        if next(self._parts, None) is not None:
            raise self._other_rows()

    def _other_rows(self) -> DataError:
        return DataError(
            f"{self._location}: the rows of the table do not match the scored rows. Remove --keep, "
            "and join the score file by its key columns."
        )


def _of(rows: Rows, column: str) -> pa.Array:
    """Return a column of ``rows``, with dictionary-encoded lists decoded."""
    if not list_dict.is_list_dict(rows.data.schema.field(column)):
        return rows.data.column(column)
    ids, offsets = arrow.sparse_column(rows, column)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
