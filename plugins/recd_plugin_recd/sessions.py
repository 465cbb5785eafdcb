"""Columns of session ids, times and lists: hashes of sessions, their shards, and checks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugins.api import (
    DataError,
    Rows,
    SessionKeys,
    broken_list,
    is_list_dict,
    place,
    to_lists,
)

Nulls = Literal["error", "empty"]

_GOLDEN = 0x9E3779B97F4A7C15


def plain_sessions(sessions: Any) -> Any:
    """Return session ids as an Arrow array of integers, strings or bytes."""
    if pt.is_dictionary(sessions.type):
        sessions = sessions.cast(sessions.type.value_type)
    kind = sessions.type
    if pt.is_fixed_size_binary(kind):
        return sessions.cast(pa.binary())
    if pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_boolean(kind):
        try:
            return sessions.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"numeric session ids must be whole and fit into int64: {error}"
            ) from error
    if not (pt.is_integer(kind) or is_text(kind)):
        raise DataError(f"session ids are of type {kind}; expected whole numbers or strings")
    return sessions


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are strings or bytes."""
    checks = (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary)
    return any(check(kind) for check in checks)


def session_hashes(sessions: Any, seed: int = 0) -> NDArray[np.uint64]:
    """Return a hash of each session id, uint64 ``[rows]``: the same on every machine, for ever.

    The hash is splitmix64 of the id's 64 bits, for text of the first 8 bytes of its BLAKE2b.
    """
    sessions = plain_sessions(sessions)
    if pt.is_integer(sessions.type):
        bits = sessions.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
    else:
        encoded = sessions.dictionary_encode()
        known = np.array([_text_bits(each.as_py()) for each in encoded.dictionary], np.uint64)
        bits = known[encoded.indices.to_numpy()]
    return _splitmix64(bits ^ np.uint64(seed * _GOLDEN % 2**64))


def session_shards(sessions: Any, num_shards: int) -> NDArray[np.int64]:
    """Return the hash mod number of shards of each session id, int64 ``[rows]``."""
    return (session_hashes(sessions) % np.uint64(num_shards)).astype(np.int64)


def check_keys(rows: Rows, keys: SessionKeys) -> None:
    """Refuse null sessions, null or NaN times, and numeric sessions that are not whole."""
    check_no_nulls(rows, keys.session)
    check_no_nulls(rows, keys.timestamp)
    times = rows.data.column(keys.timestamp)
    if pt.is_floating(times.type) and np.isnan(times.to_numpy()).any():
        row = int(np.isnan(times.to_numpy()).argmax())
        raise DataError(f"{row_place(rows, row)}, column {keys.timestamp!r}: NaN is no time")
    try:
        plain_sessions(rows.data.column(keys.session))
    except DataError as error:
        where = f"{row_place(rows, 0)} and after, column {keys.session!r}"
        raise DataError(f"{where}: {error}") from error


def check_no_nulls(rows: Rows, name: str) -> None:
    """Refuse a null in a column of sessions or times."""
    row = rows.data.column(name).is_null().index(True).as_py()
    if row >= 0:
        raise DataError(
            f"{row_place(rows, row)}, column {name!r}: null; every row needs a session and a time"
        )


def without_nulls(rows: Rows, features: Sequence[str], nulls: Nulls) -> Rows:
    """Return rows with empty lists for nulls; a feature that had some becomes plain lists."""
    data = rows.data
    for name in features:
        column, field = data[name], data.schema.field(name)
        stored = is_list_dict(field)
        if not stored and not (pt.is_list(field.type) or pt.is_large_list(field.type)):
            continue
        if column.null_count and nulls == "error":
            raise DataError(
                f"{place(rows, name, column.is_null().index(True).as_py())}: the list is null; "
                "write an empty one, or let --nulls empty make it one"
            )
        if not stored and column.flatten().null_count:
            row = next(
                row for row, each in enumerate(column) if each.values and each.values.null_count
            )
            raise DataError(
                f"{place(rows, name, row)}: a null in the list; write lists without nulls"
            )
        if column.null_count:
            lists = to_lists(column) if stored else column
            filled = lists.fill_null(pa.scalar([], lists.type))
            data = data.set_column(data.schema.get_field_index(name), name, filled)
    return replace(rows, data=data)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema with features as lists."""
    lists = pa.list_(pa.int64())
    return pa.schema(
        [pa.field(each.name, lists) if is_list_dict(each) else each for each in schema]
    )


def plain_rows(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with the columns of ``plain_schema``."""
    columns = []
    for field in schema:
        column = rows.data.column(field.name)
        if is_list_dict(rows.data.schema.field(field.name)):
            try:
                column = to_lists(column)
            except ValueError as error:
                raise broken_list(rows, field.name) from error
        columns.append(column.cast(field.type))
    return pa.record_batch(columns, schema=schema)


def row_place(rows: Rows, row: int) -> str:
    """Return the file of a row and its number there."""
    path, number = rows.origin_of(row)
    return f"{path}: row {number} (from 0)"


def _text_bits(value: str | bytes) -> int:
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _splitmix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
