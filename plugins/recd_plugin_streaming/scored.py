"""Parquet tables with the columns of a stream, for ``recd predict``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Never

import pyarrow as pa

from recd_plugin_streaming.columns import Columns
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    PluginOptions,
    Rows,
    Split,
    parquet,
    readers,
    row_tables,
)


class ScoredTable(Dataset):
    """Reads a Parquet file or folder. A missing label is 0."""

    name = "streaming.scored"

    def __init__(self, columns: Columns, location: str) -> None:
        super().__init__(PluginOptions())
        self._columns, self._location = columns, location
        self._table = parquet.ParquetTable(location if "://" in location else Path(location))

    def prepare(self) -> None:
        names = self._table.schema.names
        features = self.schema()
        for name in (*features.sparse, *features.dense):
            if name not in names:
                raise DataError(
                    f"{self._location}: there is no column {name!r}, which the stream has. Add the "
                    "column"
                )

    def schema(self) -> FeatureSchema:
        return self._columns.features

    def identity(self) -> dict[str, Any]:
        return {"train": self._table.contents()}

    def keys(self) -> Mapping[str, str]:
        names = self._table.schema.names
        return {name: name for name in self._columns.named("key", "text") if name in names}

    def reader(self, **_: object) -> Never:
        raise DataError(f"{self._location}: the table is only scored. Use scan()")

    def sample(self, batch_size: int) -> Iterator[Rows]:
        return row_tables.rebatch(self.scan(), batch_size, rest=True)

    def scan(self, split: Split = "train") -> Iterator[Rows]:  # noqa: ARG002
        features = self.schema()
        names = [*features.sparse, *features.dense, *self.keys()]
        pieces = [readers.Piece(each, 0, each.num_rows) for each in self._table.units]
        for rows in self._columns.read(self._table, pieces):
            columns = {name: rows.data.column(name) for name in names}
            columns[features.label] = rows.data.column(features.label).fill_null(0)
            yield Rows(pa.RecordBatch.from_pydict(columns), rows.origins)
