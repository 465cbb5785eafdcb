"""Describes how ids and numbers are made from the columns of a raw row, for exported models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from recd_plugin_tables.imported import ImportOptions
from recd_plugin_tables.kinds import (
    RULES,
    ColumnOptions,
    feature_name,
    is_bytes,
    is_list,
    is_span,
    is_text,
    plain,
)
from recd_plugin_tables.values import missing_id, number_type


def encodings(
    options: ImportOptions, types: Mapping[str, pa.DataType], widths: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return how to encode each feature, as in the key features of ``signature.json``.

    Args:
        options: options of the dataset.
        types: Arrow type of each column in the training table, and of each history with option
            ``store``.
        widths: list length of each ``numbers`` feature, keyed by feature name.
    """
    found = []
    for column, use in options.columns.items():
        if use.feature is not None:
            name = use.name or feature_name(column)
            kind = _element(types[column])
            made = _numbers if use.feature in ("number", "numbers") else _ids
            one = {"feature": name, "column": column, "kind": use.feature, **made(use, kind)}
            if pt.is_boolean(kind):
                one["boolean"] = True  # accepts the texts true and false
            if use.feature == "numbers":
                one["width"] = use.width or widths[name]
            if "missing" not in one:
                nan = "error" if options.on_nan == "error" else 0.0
                rule = use.missing
                one["missing"] = 0.0 if rule == "drop" else nan if rule is None else rule
                one["infinite"] = nan
            found.append(one)
    by_column = {each["column"]: each for each in found}
    for name, history in options.histories.items():
        more = {"feature": name, "column": name, "kind": "ids", "max_length": history.last}
        items = _ids(_ITEM, _element(types[name])) if history.of is None else by_column[history.of]
        found.append({**items, **more, "missing": "empty"})
    return found


#: Options of the item columns of a store of events.
_ITEM = ColumnOptions.model_validate({"as": "id", "missing": "drop"})


def _ids(use: ColumnOptions, kind: pa.DataType) -> dict[str, Any]:
    one: dict[str, Any] = {"value": "integer"}
    if use.by is not None or pt.is_date(kind):
        one = {"value": "time", "by": use.by or "day", "unit": use.unit or "s"}
    elif use.integers:
        one = {"value": "digits"}
    elif is_text(kind) or is_bytes(kind):
        one = {"value": "text" if is_text(kind) else "bytes"}
    elif pt.is_uint64(kind):
        one["unsigned"] = True
    if use.separator is not None:
        one["separator"] = use.separator
    keep = use.missing == "error" or use.missing not in (None, *RULES)
    rule = use.missing if use.missing == "error" else missing_id(use.missing)
    return one | {"missing": rule if keep else "empty"}


def _numbers(use: ColumnOptions, kind: pa.DataType) -> dict[str, Any]:
    if pt.is_timestamp(kind) or pt.is_date(kind) or use.by is not None:
        one: dict[str, Any] = {"value": "time", "by": use.by or "day", "unit": use.unit or "s"}
    else:
        one = {"value": "seconds" if is_span(kind) else "number"}
    return one | {"float32": number_type(kind) == pa.float32()}


def _element(kind: pa.DataType) -> pa.DataType:
    kind = plain(kind)
    return _element(kind.value_type) if is_list(kind) else kind


def json_value(values: pa.Array) -> Any:
    """Return the first value as JSON, in a form that ``encode.py`` accepts; None without values."""
    kind = plain(values.type)
    if pt.is_timestamp(kind):
        values = values.cast(pa.timestamp("us"), safe=False)
    elif pt.is_duration(kind):
        values = values.cast(pa.duration("us"), safe=False)
    return _as_json(values[0].as_py()) if len(values) else None


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.isoformat() if isinstance(value, date | time) else value
