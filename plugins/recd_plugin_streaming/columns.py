"""Columns of a stream, as the option ``columns`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugins.api import FeatureSchema

Role = Literal["id", "ids", "number", "label", "key", "text"]

_TYPES: Mapping[Role, pa.DataType] = {
    "id": pa.int64(),
    "ids": pa.list_(pa.int64()),
    "number": pa.float32(),
    "label": pa.float32(),
    "key": pa.int64(),
    "text": pa.string(),
}


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
        sparse = tuple(name for name, role in self.roles.items() if role in ("id", "ids"))
        dense = tuple(name for name, role in self.roles.items() if role == "number")
        (label,) = (name for name, role in self.roles.items() if role == "label")
        return FeatureSchema(sparse, dense, label)

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
        """Return a dict from each row that cannot be trained to the reason."""
        found: dict[int, str] = {}

        def add(wrong: NDArray[np.bool_], reason: str) -> None:
            for row in np.flatnonzero(wrong).tolist():
                found.setdefault(row, reason)

        for name, role in self.roles.items():
            column = batch.column(name)
            if column.null_count:
                add(_bools(pc.is_null(column)), f"column {name!r} is missing or null")
            if role == "ids" and column.flatten().null_count:
                rows = pc.list_parent_indices(column).to_numpy()
                wrong = np.zeros(len(column), np.bool_)
                wrong[rows[_bools(pc.is_null(column.flatten()))]] = True
                add(wrong, f"column {name!r} has a null in its list")
            if role == "number":
                add(~np.isfinite(_floats(column)), f"column {name!r} is not a finite number")
            if role == "label":
                values = _floats(column)
                add((values != 0) & (values != 1), f"label column {name!r} is neither 0 nor 1")
        return found


def _bools(array: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.bool_)


def _floats(column: pa.Array) -> NDArray[np.float32]:
    return np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False))


def _mistaken(field: pa.Field, column: pa.Array) -> str:
    return f"column {field.name!r} has the type {column.type}, expected {field.type}"
