"""Which rows of a table are read: conditions on its columns, which all have to hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from recd_plugins.data.list_dict import is_list_dict
from recd_plugins.errors import DataError

Op = Literal["==", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_PYTHON: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NO_VALUE = ("is null", "is not null")


class Condition(BaseModel):
    """``[column, op, value]`` or the same by name. Where the column is null only ``is null`` holds.

    NaN is unequal to every value and neither below nor above one, as everywhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    column: str = Field(description="A column of the table, or a key of its Hive partitions.")
    op: Op = Field(description="How the column's value and this one have to compare.")
    value: Any = Field(
        default=None, description="A value of the column's type; a list of them for in."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        if isinstance(given, list | tuple):
            if not 2 <= len(given) <= 3:
                raise ValueError("a condition is [column, op, value], or [column, is null]")
            return dict(zip(("column", "op", "value"), given, strict=False))
        return given

    @model_validator(mode="after")
    def _value_fits_op(self) -> Condition:
        if self.op in _NO_VALUE:
            if self.value is not None:
                raise ValueError(f"{self.op} takes no value, got {self.value!r}")
        elif self.op == "in":
            if not isinstance(self.value, list | tuple):
                raise ValueError(f"in takes a list of values, got {self.value!r}")
        elif self.value is None or isinstance(self.value, list | tuple | dict):
            raise ValueError(f"{self.op} takes one value, got {self.value!r}")
        return self

    def __str__(self) -> str:
        end = "" if self.op in _NO_VALUE else f" {self.value!r}"
        return f"{self.column} {self.op}{end}"

    def values(self) -> list[Any]:
        """What is compared with."""
        if self.op in _NO_VALUE:
            return []
        return list(self.value) if self.op == "in" else [self.value]


class RowFilter:
    """Conditions, typed by the columns of a table.

    Args:
        conditions: what has to hold, all of it.
        schema: columns of the table.
        where: the table, in an error message.

    Raises:
        DataError: there is no such column, or a value is not of its type.
    """

    def __init__(self, conditions: Sequence[Condition], schema: pa.Schema, where: object) -> None:
        self.columns = tuple(dict.fromkeys(condition.column for condition in conditions))
        self._bound = []
        for condition in conditions:
            if condition.column not in schema.names:
                raise DataError(
                    f"{where}: no column {condition.column}, which option where names; there are: "
                    f"{', '.join(schema.names)}"
                )
            field = schema.field(condition.column)
            self._bound.append((condition, _typed(condition, field, where)))

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Which rows are kept, no nulls."""
        kept = None
        for condition, values in self._bound:
            column = batch.column(condition.column)
            if pt.is_dictionary(column.type):
                column = column.dictionary_decode()
            holds = _holds(condition, values, column)
            kept = holds if kept is None else pc.and_(kept, holds)
        assert kept is not None, "a filter has conditions"
        return kept

    def verdicts(self, metadata: pq.FileMetaData) -> list[bool | None]:
        """Whether all rows of each row group are kept (True) or none (False), by statistics.

        None where these do not say.
        """
        places = {
            metadata.schema.column(place).path: place for place in range(metadata.num_columns)
        }
        # A column of lists is stored under another path; statistics say nothing of its nulls.
        bound = [
            (condition, values, places.get(condition.column)) for condition, values in self._bound
        ]
        found: list[bool | None] = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            each = [
                None
                if place is None
                else _verdict(condition, values, group.column(place), group.num_rows)
                for condition, values, place in bound
            ]
            found.append(False if False in each else True if all(each) else None)
        return found


def holds_for_key(condition: Condition, key: str | None, where: object) -> bool:
    """Whether a condition holds for what a folder of a Hive partition is named.

    The key is text, or a whole number where the condition's values are.

    Raises:
        DataError: a number is asked for and the folder has none.
    """
    values = condition.values()
    kind = pa.int64() if values and all(type(value) is int for value in values) else pa.string()
    if kind == pa.int64() and key is not None:
        try:
            column = pa.array([int(key)], kind)
        except (ValueError, OverflowError) as error:
            raise DataError(
                f"{where}: the folder says {condition.column}={key}, which is no number as option "
                f"where has it: {condition}"
            ) from error
    else:
        column = pa.array([key], kind)
    field = pa.field(condition.column, kind)
    return bool(_holds(condition, _typed(condition, field, where), column)[0].as_py())


def _holds(condition: Condition, values: pa.Array, column: pa.Array) -> pa.BooleanArray:
    if condition.op == "is null":
        return pc.is_null(column)
    if condition.op == "is not null":
        return pc.is_valid(column)
    if condition.op == "in":
        if pt.is_floating(column.type):
            # Arrow looks values up by their bits, and -0.0 is equal to 0.0.
            zero = pa.scalar(0, column.type)
            column, values = pc.add(column, zero), pc.add(values, zero)
        return pc.is_in(column, value_set=values)
    return _COMPARE[condition.op](column, values[0]).fill_null(False)


def _typed(condition: Condition, field: pa.Field, where: object) -> pa.Array:
    """The values of a condition as those of the column."""
    kind = field.type.value_type if pt.is_dictionary(field.type) else field.type
    allowed = _python_types(kind)
    if is_list_dict(field) or (not allowed and condition.op not in _NO_VALUE):
        raise DataError(
            f"{where}: option where compares column {field.name} ({condition}), which is "
            f"{field.type}; it takes booleans, numbers, text, dates and "
            "timestamps, but no float16"
        )
    if condition.op in _NO_VALUE and not allowed:
        kind = pa.null()
    converted = []
    for value in map(partial(_at_midnight, kind), condition.values()):
        fits = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        if not fits or _loses(value, kind):
            raise DataError(_unfit(where, condition, field, value))
        try:
            converted.append(_scalar(value, kind))
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise DataError(_unfit(where, condition, field, value)) from error
    return pa.array(converted, kind)


def _at_midnight(kind: pa.DataType, value: Any) -> Any:
    is_day = isinstance(value, date) and not isinstance(value, datetime)
    return datetime.combine(value, time()) if is_day and pt.is_timestamp(kind) else value


def _loses(value: Any, kind: pa.DataType) -> bool:
    """Whether a value would be compared as another one, or as none."""
    if isinstance(value, datetime):
        return pt.is_date(kind) or (value.tzinfo is None) != (kind.tz is None)
    return isinstance(value, float) and math.isnan(value)


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    if isinstance(value, str) and pt.is_temporal(kind):
        return pa.scalar(value).cast(kind)
    return pa.scalar(value, kind)


def _unfit(where: object, condition: Condition, field: pa.Field, value: Any) -> str:
    advice = ""
    if pt.is_timestamp(field.type) and field.type.tz is not None:
        advice = "; give the time with its offset, as '2024-01-31T12:00:00Z'"
    return (
        f"{where}: option where compares column {field.name}, which is {field.type}, by "
        f"{condition.op} with {value!r} ({type(value).__name__}), which is no such value{advice}"
    )


def _python_types(kind: pa.DataType) -> tuple[type, ...]:
    if pt.is_boolean(kind):
        return (bool,)
    if pt.is_integer(kind):
        return (int,)
    if pt.is_floating(kind) and not pt.is_float16(kind):
        return (int, float)
    if pt.is_string(kind) or pt.is_large_string(kind):
        return (str,)
    if pt.is_timestamp(kind) or pt.is_date(kind):
        return (str, date)  # a datetime is a date
    return ()


def _verdict(
    condition: Condition, values: pa.Array, chunk: pq.ColumnChunkMetaData, num_rows: int
) -> bool | None:
    found = chunk.statistics
    if found is None:
        return None
    num_nulls = found.null_count if found.has_null_count else None
    if condition.op in _NO_VALUE:
        if num_nulls not in (0, num_rows):
            return None
        return bool(num_nulls == num_rows) == (condition.op == "is null")
    if num_nulls == num_rows:
        return False
    if not len(values):
        return False
    bounds = _bounds(found, values.type)
    if bounds is None:
        return None
    low, high = bounds
    wanted = [value.as_py() for value in values]
    if condition.op in ("==", "in"):
        inside = any(low <= value <= high for value in wanted)
        verdict = None if inside else False
        if low == high and low in wanted:
            verdict = True
    elif condition.op == "!=":
        verdict = True if not low <= wanted[0] <= high else None
        if low == high == wanted[0] and not pt.is_floating(values.type):
            verdict = False
    else:
        compare = _PYTHON[condition.op]
        ends = compare(low, wanted[0]), compare(high, wanted[0])
        verdict = ends[0] if ends[0] == ends[1] else None
    # A NaN is in no bounds.
    certain = num_nulls == 0 and not pt.is_floating(values.type)
    return verdict if verdict is not True or certain else None


def _bounds(found: pq.Statistics, kind: pa.DataType) -> tuple[Any, Any] | None:
    """Smallest and largest value, None where they are not known for sure."""
    if not found.has_min_max or (pt.is_timestamp(kind) and kind.unit == "ns"):
        return None
    try:
        low, high = (pa.scalar(each, kind).as_py() for each in (found.min, found.max))
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None
    if low is None or high is None or low != low or high != high or high < low:
        return None
    return low, high
