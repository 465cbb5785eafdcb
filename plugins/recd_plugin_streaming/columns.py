"""Columns of a stream, and options of columns and windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal, Self

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from recd_plugins.api import DataError, FeatureSchema, PluginOptions, Rows, parquet, readers

Role = Literal["id", "ids", "number", "label", "key", "text"]

_TYPES: Mapping[Role, pa.DataType] = {
    "id": pa.int64(),
    "ids": pa.list_(pa.int64()),
    "number": pa.float32(),
    "label": pa.float32(),
    "key": pa.int64(),
    "text": pa.string(),
}


class StreamOptions(PluginOptions):
    """Options of columns and windows."""

    columns: dict[str, Role] = Field(
        min_length=2,
        description="Columns and their roles. id, ids: feature with one integer or a list. number: "
        "dense feature. label: 0 or 1. key, text: integer or text for group_by only.",
    )
    group_by: str | None = Field(
        default=None,
        description="Column of the session or request. Rows with equal values follow each other.",
    )
    window_rows: PositiveInt = Field(
        default=8192, description="For group_by: maximum rows per window and rank."
    )
    window_seconds: PositiveFloat = Field(
        default=5.0, description="For group_by: longest duration of a window."
    )

    @model_validator(mode="after")
    def _names_columns(self) -> Self:
        roles = list(self.columns.values())
        if roles.count("label") != 1:
            raise ValueError(
                f"{roles.count('label')} columns have the role label. Give it to one column"
            )
        grouping = self.columns.get(self.group_by or "")
        if self.group_by is not None and grouping not in ("id", "key", "text"):
            raise ValueError(
                f"group_by: {self.group_by!r} is no column with the role id, key or text. Add it "
                "to columns with the role key (integers) or text"
            )
        return self


class Columns:
    """The columns of a stream: names, types, and checks of their values."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self.roles = dict(roles)

    @cached_property
    def arrow(self) -> pa.Schema:
        """Return the Arrow types of the columns."""
        return pa.schema([(name, _TYPES[role]) for name, role in self.roles.items()])

    @cached_property
    def features(self) -> FeatureSchema:
        (label,) = self.named("label")
        return FeatureSchema(self.named("id", "ids"), self.named("number"), label)

    def named(self, *roles: Role) -> tuple[str, ...]:
        """Return the names of the columns with these roles."""
        return tuple(name for name, role in self.roles.items() if role in roles)

    def read(self, table: parquet.ParquetTable, pieces: Iterable[readers.Piece]) -> Iterator[Rows]:
        """Read rows of a table with these columns and types. A missing column becomes nulls."""
        names = [name for name in self.arrow.names if name in table.schema.names]
        for rows in table.read(pieces, pa.schema([table.schema.field(name) for name in names])):
            try:
                data = self.cast(rows.data)
            except ValueError as error:
                raise DataError(
                    f"{rows.place_of(0)}: {error}. Convert the column, or correct the option "
                    "'columns'"
                ) from error
            yield Rows(data, rows.origins)

    def cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with these columns and types. A missing column becomes nulls.

        Raises:
            ValueError: a column has a type or a value that does not fit.
        """
        arrays = []
        for field in self.arrow:
            if batch.schema.get_field_index(field.name) < 0:
                arrays.append(pa.nulls(batch.num_rows, field.type))
                continue
            column = batch.column(field.name)
            numeric = self.roles[field.name] in ("number", "label")
            # Float64 is rounded to float32, but text and numbers are not converted to each other.
            if pa.types.is_string(column.type) != pa.types.is_string(field.type):
                raise ValueError(_mistaken(field, column))
            try:
                arrays.append(column.cast(field.type, safe=not numeric))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise ValueError(f"{_mistaken(field, column)} ({error})") from error
        return pa.record_batch(arrays, schema=self.arrow)

    def mistakes(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Return a dict from the index of each invalid row to the reason."""
        found: dict[int, str] = {}
        for name, role in self.roles.items():
            column = batch.column(name)
            wrong = {"is missing or null": pc.indices_nonzero(pc.is_null(column))}
            if role == "ids":
                no_ids = pc.is_null(column.flatten())
                wrong["has a null in its list"] = pc.list_parent_indices(column).filter(no_ids)
            elif role == "number":
                is_finite = pc.is_finite(column)
                wrong["is not a finite number"] = pc.indices_nonzero(pc.invert(is_finite))
            elif role == "label":
                is_label = pc.is_in(column, pa.array([0, 1], pa.float32()))
                wrong["is neither 0 nor 1"] = pc.indices_nonzero(pc.invert(is_label))
            for reason, rows in wrong.items():
                for row in rows.to_pylist():
                    found.setdefault(row, f"column {name!r} {reason}")
        return found


def _mistaken(field: pa.Field, column: pa.Array) -> str:
    return f"column {field.name!r} has the type {column.type}, expected {field.type}"
