"""A day of Criteo's rows as Parquet: what ``recd criteo convert`` writes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from recd_plugin_dlrm.criteo.day import Day, Stretch
from recd_plugin_dlrm.criteo.rows import COLUMNS, DENSE, LABEL, SPARSE, RawRows
from recd_plugins.api import DataError, Origin
from recd_plugins.api.reading import Piece
from recd_plugins.api.tables import ParquetTable

#: What files are written with.
SCHEMA = pa.schema(
    [
        pa.field(LABEL, pa.int8(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in (*DENSE, *SPARSE)),
    ]
)


class ParquetDay(Day):
    """Rows of a Parquet file, or of all in a folder.

    Raises:
        DataError: a column is missing or of the wrong type, or there are no rows.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._table = ParquetTable(path)
        self._schema = _columns(self._table)
        units = self._table.units
        self.num_rows = sum(unit.num_rows for unit in units)
        if not self.num_rows:
            raise DataError(f"{path}: no rows")
        starts = list(accumulate((unit.num_rows for unit in units), initial=0))[:-1]
        self.starts = np.array(starts, np.int64)

    def identity(self) -> list[Any]:
        return [self.name, *self._table.identity()]

    def contents(self) -> dict[str, Any]:
        return self._table.contents()

    def read(
        self, stretches: Iterable[Stretch]
    ) -> Generator[tuple[RawRows, tuple[Origin, ...]], None, None]:
        for rows in self._table.read(self._pieces(stretches), self._schema):
            data = rows.data
            for name in COLUMNS:
                if data.column(name).null_count:
                    path, row = rows.origin_of(0)
                    raise DataError(f"{path}: column {name} has a null in row {row} or after it")
            labels = data.column(LABEL).to_numpy()
            if len(wrong := np.flatnonzero((labels != 0) & (labels != 1))):
                path, row = rows.origin_of(int(wrong[0]))
                raise DataError(
                    f"{path}: row {row}, column {LABEL}: {labels[wrong[0]]} is neither 0 nor 1"
                )
            yield (
                RawRows(
                    labels,
                    [data.column(name).to_numpy() for name in DENSE],
                    [data.column(name).to_numpy() for name in SPARSE],
                ),
                rows.origins,
            )

    def _pieces(self, stretches: Iterable[Stretch]) -> Iterator[Piece]:
        for stretch in stretches:
            unit = int(np.searchsorted(self.starts, stretch.first_row, "right")) - 1
            skip = stretch.first_row - int(self.starts[unit])
            yield Piece(self._table.units[unit], skip, stretch.num_rows)


def _columns(table: ParquetTable) -> pa.Schema:
    fields = []
    for name in COLUMNS:
        if name not in table.schema.names:
            raise DataError(
                f"{table.files[0]}: no column {name}; columns are {LABEL}, {DENSE[0]} to "
                f"{DENSE[-1]} and {SPARSE[0]} to {SPARSE[-1]}, as `recd criteo convert` writes them"
            )
        kind = table.schema.field(name).type
        is_float = pt.is_float32(kind) and name in DENSE
        if not (pt.is_integer(kind) or is_float):
            raise DataError(f"{table.files[0]}: column {name} is {kind}, not whole numbers")
        wanted = pa.int8() if name == LABEL else pa.float32() if is_float else pa.int64()
        fields.append(pa.field(name, wanted))
    return pa.schema(fields)
