"""Which types of Arrow a use of a column can take."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from recd_plugin_tables.columns import RULES, ColumnOptions, Role
from recd_plugin_tables.leaves import is_list, plain


def possible_roles(kind: pa.DataType) -> tuple[Role, ...]:
    """What a leaf of this type can be; of a time as an id, ``by`` has to say more."""
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
    """Why a leaf of this type cannot be that, and what to do; None where it can."""
    kind = plain(kind)
    if role == "unused":
        return None
    if holds_nothing(kind):
        return "it holds nothing but nulls, or the table has no rows; mark it unused"
    possible = possible_roles(kind)
    if role not in possible:
        instead = _instead(role, kind) or f"it can be {', '.join(possible)}"
        return f"it cannot be {role}; {instead}"
    if role == "ids" and is_text(kind) and options.separator is None:
        return "ids of a text need a separator, as in separator: '|'; a text that is one id is id"
    if role == "ids" and is_list(kind) and options.separator is not None:
        return "separator is for text, and these are lists"
    stored = options.unit is not None and _is_amount(kind)
    timed = _is_time(kind) or is_text(kind) or stored
    if role in ("id", "number") and options.by is not None and not timed:
        return f"by: {options.by} is for times since 1970; of one that is a number, set unit"
    if role == "id" and pt.is_timestamp(kind) and options.by is None:
        return "a time is no id; set by: hour, weekday or day, or make it number"
    if role == "label" and is_text(kind) and options.positive is None:
        return "a label that is text needs positive: [the values that are 1]"
    if role == "label" and is_text(kind) and _has_others(options.positive):
        return (
            "a label that is text is compared with texts; in positive: write what is no text, as "
            "1 or true, in quotes: '1' is the text 1"
        )
    if role in ("id", "ids") and options.texts and not holds_text(kind):
        return "texts: true is for ids that are text"
    if isinstance(options.missing, str) and options.missing not in RULES:
        return None if holds_text(kind) else f"missing: {options.missing} is none of its values"
    if role == "time" and options.unit is not None and (_is_time(kind) or is_text(kind)):
        return "unit is for times that are stored as numbers"
    return None


def _has_others(positive: tuple[object, ...] | None) -> bool:
    return any(not isinstance(each, str) for each in positive or ())


def is_text(kind: pa.DataType) -> bool:
    """Whether values are text."""
    return bool(pt.is_string(kind) or pt.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are bytes, as of UUIDs."""
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind))


def is_span(kind: pa.DataType) -> bool:
    """Whether values are times of day or durations."""
    return bool(pt.is_time(kind) or pt.is_duration(kind))


def holds_nothing(kind: pa.DataType) -> bool:
    """Whether there is nothing but nulls in it."""
    return pt.is_null(kind) or (is_list(kind) and holds_nothing(plain(kind.value_type)))


def holds_text(kind: pa.DataType) -> bool:
    """Whether values are text, or lists of it."""
    kind = plain(kind)
    return is_text(kind) or (is_list(kind) and is_text(plain(kind.value_type)))


def values_of(kind: pa.DataType) -> str:
    """What values are, in a word: those of another one are never the same ids or numbers."""
    kind = plain(kind)
    if is_list(kind):
        return values_of(kind.value_type)
    sorts = {
        "text": is_text(kind),
        "bytes": is_bytes(kind),
        "times": _is_time(kind),
        "times of day": pt.is_time(kind),
        "durations": pt.is_duration(kind),
    }
    return next((name for name, fits in sorts.items() if fits), "numbers")


def type_of_values(what: str) -> pa.DataType:
    """A type whose ``values_of`` say that; null where no type's do."""
    return _TYPES.get(what, pa.null())


_TYPES = {
    "text": pa.string(),
    "bytes": pa.binary(),
    "times": pa.timestamp("us"),
    "times of day": pa.time64("us"),
    "durations": pa.duration("us"),
    "numbers": pa.int64(),
}


def _is_time(kind: pa.DataType) -> bool:
    return bool(pt.is_timestamp(kind) or pt.is_date(kind))


def _is_amount(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind))


def _is_number(kind: pa.DataType) -> bool:
    return _is_amount(kind) or pt.is_boolean(kind) or _is_time(kind) or is_span(kind)


def _is_id(kind: pa.DataType) -> bool:
    return (
        _is_amount(kind) or pt.is_boolean(kind) or is_text(kind) or is_bytes(kind) or _is_time(kind)
    )


def _instead(role: Role, kind: pa.DataType) -> str:
    if is_list(kind) and role in ("id", "number"):
        return f"it is a list: {role}s"
    if not (is_list(kind) or pt.is_map(kind)) and role in ("ids", "numbers"):
        return f"it is one value a row: {role.removesuffix('s')}"
    if is_list(kind) and is_list(plain(kind.value_type)):
        return "lists of lists are no feature: name the column under explode, or mark it unused"
    if pt.is_map(kind):
        return "maps are not read: write its keys and its values as two lists, or mark it unused"
    if role in ("number", "numbers"):
        return (
            "only numbers can: write it as numbers (of CSV, source.types says that 007 is int64), "
            "or make it an id"
        )
    return ""
