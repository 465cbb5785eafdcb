"""Row filters, which convert conditions on columns to a pyarrow expression."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import reduce
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from recd_plugins.runtime.errors import DataError

Op = Literal["==", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NO_VALUE = ("is null", "is not null")
# Name of the column with row numbers while a filter is applied.
_ROW = "row number"


class Condition(BaseModel):
    """Condition on a column, written ``[column, op, value]`` or as a mapping with these keys.

    A null satisfies only ``is null``. NaN is unequal to every value, as in IEEE 754.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    column: str = Field(description="A column of the table, or a key of its Hive partitions.")
    op: Op = Field(description="Comparison of the column with value.")
    value: Any = Field(
        default=None, description="A value of the column's type; a list of them for in."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        if isinstance(given, list | tuple):
            if not 2 <= len(given) <= 3:
                raise ValueError(
                    f"the condition has {len(given)} items. Write [column, op, value], or "
                    "[column, is null]"
                )
            return dict(zip(("column", "op", "value"), given, strict=False))
        return given

    @model_validator(mode="after")
    def _value_fits_op(self) -> Condition:
        needs = "a single value"
        fits = self.value is not None and not isinstance(self.value, list | tuple | dict)
        if self.op in _NO_VALUE:
            needs, fits = "no value", self.value is None
        elif self.op == "in":
            needs, fits = "a list of values", isinstance(self.value, list | tuple)
        if not fits:
            raise ValueError(f"operator {self.op!r} needs {needs}, got {self.value!r}")
        return self

    def __str__(self) -> str:
        end = "" if self.op in _NO_VALUE else f" {self.value!r}"
        return f"{self.column} {self.op}{end}"


class RowFilter:
    """Filter for rows that satisfy all of several conditions on columns of ``schema``.

    ``columns`` are the columns that the conditions use. ``floats`` is True if one of them contains
    floats, whose Parquet statistics omit NaN.
    """

    def __init__(self, conditions: Sequence[Condition], schema: pa.Schema, where: object) -> None:
        self.columns = tuple(dict.fromkeys(condition.column for condition in conditions))
        fields = [schema.field(name) for name in self.columns]
        self.floats = any(pt.is_floating(field.type) for field in fields)
        self.expression = reduce(
            operator.and_, (_expression(each, schema, where) for each in conditions)
        )

    def kept(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the indices of rows that satisfy all conditions, int64 ``[num_kept]``."""
        columns = {name: batch.column(name) for name in self.columns}
        columns[_ROW] = pa.array(np.arange(batch.num_rows))
        kept = pa.record_batch(columns).filter(self.expression)
        rows: NDArray[np.int64] = kept.column(_ROW).to_numpy()
        return rows


def holds_for_key(condition: Condition, key: str | None, where: object) -> bool:
    """Return whether a Hive partition key, such as ``day=3``, satisfies a condition."""
    values = condition.value if condition.op == "in" else [condition.value]
    kind = pa.int64() if values and all(type(value) is int for value in values) else pa.string()
    try:
        column = pa.array([key], pa.string()).cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{where}: option 'where' compares the partition {condition.column}={key} with a "
            f"number: {condition}. Write the value in quotes"
        ) from error
    row = pa.record_batch({condition.column: column})
    return len(RowFilter([condition], row.schema, where).kept(row)) > 0


def _expression(condition: Condition, schema: pa.Schema, where: object) -> pc.Expression:
    kind = schema.field(condition.column).type
    column = pc.field(condition.column)
    if condition.op == "is null":
        return column.is_null()
    if condition.op == "is not null":
        return column.is_valid()
    if pt.is_dictionary(kind):
        kind = kind.value_type
        column = column.cast(kind)
    values = condition.value if condition.op == "in" else [condition.value]
    try:
        typed = pa.array([_typed(value, kind) for value in values], kind)
        if condition.op == "in":
            if pt.is_floating(kind):
                # Arrow compares bits, but -0.0 equals 0.0.
                zero = pa.scalar(0, kind)
                column, typed = pc.add(column, zero), pc.add(typed, zero)
            expression = column.isin(typed)
        else:
            expression = _COMPARE[condition.op](column, typed[0])
        schema.empty_table().select([condition.column]).filter(expression)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        raise DataError(
            f"{where}: condition {condition} of option 'where' does not fit column "
            f"{condition.column!r} of type {kind}: {error}. Use a value of this type"
        ) from error
    return expression


def _typed(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Convert a value to the column's type. Raises ValueError if the value would change."""
    is_datetime = isinstance(value, datetime)
    if isinstance(value, date) and not is_datetime and pt.is_timestamp(kind):
        value, is_datetime = datetime.combine(value, time()), True
    if is_datetime and (pt.is_date(kind) or (value.tzinfo is None) != (kind.tz is None)):
        raise ValueError(
            f"{value!r} does not match the column type. Write a time zone only if the column has "
            "a time zone, and a date for a date column"
        )
    if isinstance(value, float) and (math.isnan(value) or pt.is_integer(kind)):
        raise ValueError(f"{value!r} is not a value of type {kind}")
    if isinstance(value, bool) != pt.is_boolean(kind):
        raise ValueError(f"{value!r} is not a value of type {kind}")
    if isinstance(value, str) and pt.is_temporal(kind):
        return pa.scalar(value).cast(kind)
    return pa.scalar(value, kind)
