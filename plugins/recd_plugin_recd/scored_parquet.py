"""A table of Parquet files whose rows a model that was trained on another one scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.api import FeatureSchema, Rows, SessionKeys, Split
from recd_plugins.api.reading import Piece


class ScoredParquet(SessionParquet):
    """Every row of a table, with the features of another one.

    Args:
        trained: the dataset that the model was trained on.
        location: of the table.
    """

    def __init__(self, trained: SessionParquet, location: str) -> None:
        # What leaves rows out, or puts them into another order, is of training alone.
        own: dict[str, Any] = {"test_path": None, "where": [], "generate": None, "shuffle": False}
        values = {**trained.options.model_dump(), "path": location, **own}
        super().__init__(type(trained.options).model_validate(values))
        self._schema = trained.schema()

    def schema(self) -> FeatureSchema:
        return self._schema

    def session_keys(self) -> SessionKeys | None:
        """None where the table lacks session or time, which scoring does without."""
        return super().session_keys() if len(self.keys()) == 2 else None

    def keys(self) -> tuple[str, ...]:
        """Session and time, where they are there."""
        wanted = (self.options.session, self.options.timestamp)
        return tuple(name for name in wanted if name in self._table.schema.names)

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        """With labels that are 0: those of the table, if any, are not looked at."""
        table, schema = self._table_of(split), self._schema
        without = FeatureSchema(schema.sparse, schema.dense, "")
        columns = self._columns(table, without)
        for name in self.keys():
            columns = columns.append(table.schema.field(name))
        for rows in table.read((Piece(unit, 0, unit.num_rows) for unit in table.units), columns):
            labels = pa.nulls(len(rows), pa.int8()).fill_null(0)
            arrays = [*rows.data.columns, labels]
            names = [*rows.data.schema.names, schema.label]
            yield Rows(pa.RecordBatch.from_arrays(arrays, names=names), rows.origins)
