"""Column options of the tables plugin, and the types of columns and struct fields."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_serializer, model_validator

from recd_plugins.api import PluginOptions

Role = Literal[
    "id", "ids", "number", "numbers", "session", "time", "request", "key", "label", "unused"
]
#: Roles of features; a column has at most one of them.
FEATURES: tuple[Role, ...] = ("id", "ids", "number", "numbers")
#: Roles of columns that are copied to score files.
KEYS: tuple[Role, ...] = ("session", "time", "request", "key")
#: Allowed values of ``missing``, apart from a replacement value.
RULES = ("error", "drop", "empty")

Missing = Literal["error", "empty", "drop"] | float | int | str
Unit = Literal[
    "s", "ms", "us", "ns", "YYYYMMDD", "YYMMDDHH", "YYYYMMDDHH", "YYYYMMDDHHMM", "YYYYMMDDHHMMSS"
]


class ColumnOptions(PluginOptions):
    """Role and options of a column."""

    roles: tuple[Role, ...] = Field(
        alias="as",
        min_length=1,
        description="Role: id, ids, number, numbers, session, time, request, key, label "
        "or unused. Use a list for several roles, such as [session, id].",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^\w+$",
        description="Name of the feature; null means the column name with dots replaced "
        "by underscores.",
    )
    missing: Missing | None = Field(
        default=None,
        description="How to handle nulls, and NaN in numbers: error, drop (the row), "
        "empty (no id; omitted from lists), or a replacement value. Times "
        "cannot have a replacement value. Default null: empty for ids, the "
        "dataset's on_nan for numbers, a separate session for rows without a "
        "session, error for all others.",
    )
    unit: Unit | None = Field(
        default=None,
        description="Unit of a numeric time: s (default), ms, us or ns since 1970, or date digits "
        "such as YYYYMMDD.",
    )
    by: Literal["hour", "weekday", "day"] | None = Field(
        default=None,
        description="Part of a time to use as the feature: hour of the day, day of the "
        "week (Monday is 0) or days since 1970. As a number it includes the "
        "fraction.",
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="Separator of the ids in a text, such as | in Action|Comedy.",
    )
    integers: bool = Field(
        default=False,
        description="Parse the ids in a text as integers, so that they match ids of "
        "integer columns. Otherwise they are hashed as text.",
    )
    texts: bool = Field(
        default=False,
        description="Store the text of each id in the import, so that embedding exports show it.",
    )
    width: int | None = Field(
        default=None,
        ge=1,
        description="Length of a list of numbers; null means the length of the first list.",
    )
    positive_from: float | None = Field(
        default=None, description="Smallest label value that becomes 1; lower values become 0."
    )
    positive: tuple[str | float | bool, ...] | None = Field(
        default=None, min_length=1, description="Label values that become 1; all others become 0."
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"as": given} if isinstance(given, str | list | tuple) else given

    @field_validator("separator", mode="before")
    @classmethod
    def _unescaped(cls, separator: Any) -> Any:
        return unescaped(separator)

    @field_validator("roles", mode="before")
    @classmethod
    def _listed(cls, roles: Any) -> Any:
        return [roles] if isinstance(roles, str) else roles

    @model_validator(mode="after")
    def _fit_together(self) -> ColumnOptions:
        if problems := ". ".join(self._problems()):
            raise ValueError(problems)
        return self

    def _problems(self) -> Iterator[str]:
        roles = set(self.roles)
        alone = [role for role in self.roles if role in ("label", "unused")]
        if alone and len(roles) > 1:
            yield f"role {alone[0]!r} cannot be combined with other roles. Remove the other roles"
        features = dict.fromkeys(role for role in self.roles if role in FEATURES)
        if len(features) > 1:
            yield (
                f"roles {' and '.join(map(repr, features))} cannot be combined. Keep one of these "
                "roles"
            )
        for option, needed in _ONLY_FOR.items():
            if getattr(self, option) is not None and not roles & set(needed):
                yield (
                    f"option {option!r} needs a column with role {' or '.join(map(repr, needed))}. "
                    "Remove the option or change the role"
                )
        numeric = {"number", "numbers", "label", "time"} & roles
        if numeric and isinstance(self.missing, str) and self.missing not in ("error", "drop"):
            yield (
                f"missing: {self.missing!r} is not valid for role "
                f"{' and '.join(map(repr, sorted(numeric)))}. Use 'error', 'drop' or a number"
            )
        elif "time" in roles and isinstance(self.missing, int | float):
            yield (
                f"missing: {self.missing!r} is a number, which cannot replace a missing time. Use "
                "'drop' or 'error'"
            )

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "roles"}
        # 0 is a valid value even though it equals False.
        return {"as": [*self.roles]} | {
            name: each for name, each in given.items() if each is not None and each is not False
        }

    @property
    def feature(self) -> Role | None:
        """The role of the column as a model feature, or None if it is not a feature."""
        return next((role for role in self.roles if role in FEATURES), None)


Columns = Annotated[dict[str, ColumnOptions], Field(min_length=1)]

_ONLY_FOR: dict[str, tuple[Role, ...]] = {
    "name": FEATURES,
    "unit": ("time", "id", "number"),
    "by": ("id", "number"),
    "separator": ("ids",),
    "width": ("numbers",),
    "positive": ("label",),
    "positive_from": ("label",),
}


def unescaped(separator: Any) -> Any:
    r"""Replace escape sequences such as ``\t`` or ``\x01`` in a separator by their character."""
    if isinstance(separator, str) and re.fullmatch(r"\\(t|x[0-9a-fA-F]{2})", separator):
        return codecs.decode(separator, "unicode_escape")
    return separator


def feature_name(column: str) -> str:
    """Return the feature name of a column: special characters become underscores."""
    return re.sub(r"\W", "_", column)


# Few Arrow functions accept the view types that Polars writes.
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


@dataclass(frozen=True)
class Leaf:
    """A column of a table or, for a struct column, one of its fields.

    If ``exploded``, the column is a list and each element becomes a row.
    """

    name: str
    type: pa.DataType
    path: tuple[str, ...]
    exploded: bool = False


def leaves(schema: pa.Schema, explode: Collection[str] = ()) -> list[Leaf]:
    """Return the leaves (columns and struct fields) of a schema, in order.

    Leaves of the columns in ``explode`` have the type of the list elements.
    """
    found = []
    for field in schema:
        kind, exploded = plain(field.type), field.name in explode
        if exploded and is_list(kind):
            kind = plain(kind.value_type)
        for below, of in _below(kind):
            path = (field.name, *below)
            found.append(Leaf(".".join(path), of, path, exploded))
    return found


def _below(kind: pa.DataType) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    if pt.is_struct(kind):
        for field in kind:
            for path, of in _below(plain(field.type)):
                yield (field.name, *path), of
    elif is_list(kind) and pt.is_struct(plain(kind.value_type)):
        for path, of in _below(plain(kind.value_type)):
            yield path, pa.list_(of)
    else:
        yield (), kind


def leaf_array(column: pa.Array, leaf: Leaf) -> pa.Array:
    """Return the values of a leaf (a column or struct field).

    ``column`` has the values of the top-level column, or its elements if it is exploded.
    """
    return _at(normal(column), leaf.path[1:])


def _at(values: pa.Array, path: tuple[str, ...]) -> pa.Array:
    if not path:
        return values
    if pt.is_struct(values.type):
        return _at(normal(pc.struct_field(values, path[0])), path[1:])
    # For a list of structs, return lists of the field, with the same lengths.
    offsets, items, empty = list_parts(values)
    return pa.ListArray.from_arrays(pa.array(offsets), _at(items, path), mask=empty)


def list_parts(values: pa.Array) -> tuple[NDArray[np.int32], pa.Array, pa.BooleanArray]:
    """Split a list array into int32 offsets that start at 0, elements, and a mask of null lists."""
    values = normal(values)
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return offsets, normal(values.flatten()), values.is_null()


def is_constant(groups: pa.Array, values: pa.Array) -> bool:
    """Return whether values are equal in each group, and at least one group has several rows."""
    if pt.is_nested(values.type):
        return False
    groups, values = (
        each.dictionary_decode() if pt.is_dictionary(each.type) else each
        for each in (groups, values)
    )
    found = pa.table({"group": groups, "value": values}).group_by("group")
    counts = found.aggregate([("value", "count"), ("value", "count_distinct")])
    rows, distinct = (
        pc.max(counts[f"value_{name}"]).as_py() for name in ("count", "count_distinct")
    )
    return bool(rows > 1 and distinct == 1)


def normal(values: pa.Array) -> pa.Array:
    """Convert extension, run-end encoded and view types to basic Arrow types."""
    kind = values.type
    if isinstance(values, pa.ExtensionArray):
        return normal(values.storage)
    if pt.is_run_end_encoded(kind):
        runs = np.searchsorted(values.run_ends, np.arange(len(values)) + values.offset, "right")
        return normal(values.values).take(pa.array(runs))
    if pt.is_dictionary(kind) and (pt.is_nested(kind.value_type) or plain(kind) != kind.value_type):
        return normal(values.dictionary).take(values.indices)
    return values.cast(_VIEWS[kind]) if kind in _VIEWS else values


def plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without extension, dictionary, run-end encoding or view."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if pt.is_dictionary(kind) or pt.is_run_end_encoded(kind):
        return plain(kind.value_type)
    return _VIEWS.get(kind, kind)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is any list type."""
    return bool(
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )


def possible_roles(kind: pa.DataType) -> tuple[Role, ...]:
    """Return the roles that a column of this type can have."""
    kind = plain(kind)
    if is_list(kind):
        of = plain(kind.value_type)
        found: list[Role] = ["ids"] if _is_id(of) and not _is_time(of) else []
        return (*found, *(("numbers",) if _is_number(of) and not _is_time(of) else ()), "unused")
    roles: list[Role] = []
    if _is_id(kind):
        roles.append("id")
    if is_text(kind):
        roles.append("ids")
    if _is_number(kind):
        roles.append("number")
    if _is_id(kind) and not _is_time(kind):
        roles += ["session", "request"]
    if _is_time(kind) or pt.is_integer(kind) or pt.is_floating(kind) or is_text(kind):
        roles.append("time")
    if not (pt.is_null(kind) or pt.is_nested(kind) or pt.is_interval(kind)):
        roles.append("key")
    if pt.is_boolean(kind) or is_text(kind) or _is_amount(kind):
        roles.append("label")
    return (*roles, "unused")


def why_not(role: Role, kind: pa.DataType, options: ColumnOptions) -> str | None:
    """Return why a column of this type cannot have a role, or None if it can."""
    kind = plain(kind)
    if role == "unused":
        return None
    if holds_nothing(kind):
        return "the column has only nulls, or the table has no rows. Set the role to 'unused'."
    possible = possible_roles(kind)
    if role not in possible:
        return (
            f"this type does not support role {role!r}. Use one of these roles: "
            f"{', '.join(map(repr, possible))}."
        )
    if role == "ids" and is_text(kind) and options.separator is None:
        return (
            "role 'ids' on text needs a separator. Set a separator, such as separator: '|', or use "
            "role 'id' if each text is a single id."
        )
    if role == "id" and pt.is_timestamp(kind) and options.by is None:
        return (
            "a timestamp cannot have role 'id' without option 'by'. Set by: hour, weekday or day, "
            "or use role 'number'."
        )
    if role == "label" and is_text(kind) and options.positive is None:
        return "a text label must be mapped to 0 and 1. Set positive: [VALUES] (these become 1)."
    return None


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is a string type."""
    return bool(pt.is_string(kind) or pt.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether a type is a binary type, as for UUIDs."""
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind))


def is_span(kind: pa.DataType) -> bool:
    """Return whether a type is a time of day or a duration."""
    return bool(pt.is_time(kind) or pt.is_duration(kind))


def holds_nothing(kind: pa.DataType) -> bool:
    """Return whether a type is null, or a list of null."""
    return pt.is_null(kind) or (is_list(kind) and holds_nothing(plain(kind.value_type)))


def holds_text(kind: pa.DataType) -> bool:
    """Return whether a type is a string type, or a list of strings."""
    kind = plain(kind)
    return is_text(kind) or (is_list(kind) and is_text(plain(kind.value_type)))


_LISTS = "lists of "
_TYPES = {
    "text": pa.string(),
    "bytes": pa.binary(),
    "times": pa.timestamp("us"),
    "times of day": pa.time64("us"),
    "durations": pa.duration("us"),
    "numbers": pa.int64(),
}


def sort_of(kind: pa.DataType) -> str:
    """Return the category of a type: text, bytes, times, times of day, durations or numbers.

    Ids of different categories are never equal. The category of lists starts with ``lists of``.
    """
    kind = plain(kind)
    if is_list(kind):
        return _LISTS + sort_of(kind.value_type).removeprefix(_LISTS)
    fits = (is_text, is_bytes, _is_time, pt.is_time, pt.is_duration)
    return next((name for name, fit in zip(_TYPES, fits, strict=False) if fit(kind)), "numbers")


def type_of_sort(sort: str) -> pa.DataType:
    """Return an example Arrow type for a category of ``sort_of``."""
    kind = _TYPES[sort.removeprefix(_LISTS)]
    return pa.list_(kind) if sort.startswith(_LISTS) else kind


def _is_time(kind: pa.DataType) -> bool:
    return bool(pt.is_timestamp(kind) or pt.is_date(kind))


def _is_amount(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind))


def _is_number(kind: pa.DataType) -> bool:
    return _is_amount(kind) or pt.is_boolean(kind) or _is_time(kind) or is_span(kind)


def _is_id(kind: pa.DataType) -> bool:
    texts = is_text(kind) or is_bytes(kind)
    return texts or _is_amount(kind) or pt.is_boolean(kind) or _is_time(kind)
