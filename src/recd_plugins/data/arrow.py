"""Conversion of Arrow columns to arrays and tensors, without a copy where possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recd_plugins.data.list_dict import DECODED, ID_BYTES, is_id_list, is_list_dict, to_lists
from recd_plugins.interfaces.rows import FeatureSchema, Rows
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.text import did_you_mean
from recd_plugins.sparse.dedup import JaggedColumn
from recd_plugins.sparse.dictionaries import DictionaryColumn

# torch is not imported at the top, so that commands without tensors start fast.
if TYPE_CHECKING:
    from torch import Tensor

_MAX_SHOWN = 60
_NO_BYTES = np.empty(0, np.uint8)


def sparse_column(rows: Rows, name: str) -> JaggedColumn:
    """Return the ids of a column and the offsets of its rows.

    Lists of int64 are not copied, and smaller integers are converted. A column of plain
    integers has one id per row.

    Returns:
        ``(values, offsets)``: read-only int64 ids, and int32 or int64 ``[B + 1]``. The first
        offset can be above 0.

    Raises:
        DataError: the column is missing or of another type, or has a null.
    """
    column = column_without_nulls(rows, name)
    if pa.types.is_integer(column.type) and column.type != pa.uint64():
        return _ids(column), np.arange(len(column) + 1, dtype=np.int32)
    if is_list_dict(rows.data.schema.field(name)):
        try:
            column = to_lists(column)
        except ValueError as error:
            raise broken_list(rows, name) from error
    if not is_id_list(column.type):
        raise _wrong_type(rows, name, column, "list<int64> or int64")
    offsets, items = column.offsets.to_numpy(), column.values
    if items.type == pa.int64() and items.null_count == 0:
        return _ids(items), offsets
    # Widen only the values of these rows; nulls in other rows are no errors.
    first = int(offsets[0])
    used = items.slice(first, int(offsets[-1]) - first)
    if used.null_count:
        row = int(np.searchsorted(offsets, first + _first_null(used), "right")) - 1
        raise DataError(
            f"{place(rows, name, row)}: the list {_shown(column, row)} contains a null. Fill or "
            "drop nulls"
        )
    return _ids(used), offsets - first


def dictionary_column(rows: Rows, name: str) -> DictionaryColumn | None:
    """Return a column of type dictionary<int32, binary> without a copy; None for other types.

    Raises:
        DataError: the column is missing or has a null.
    """
    column = column_without_nulls(rows, name)
    if column.type != DECODED or not is_list_dict(rows.data.schema.field(name)):
        return None
    dictionary = column.dictionary
    _, bounds, data = dictionary.buffers()
    if not len(dictionary):
        return DictionaryColumn(np.empty(0, np.int32), np.zeros(1, np.int32), _NO_BYTES)
    start = dictionary.offset
    return DictionaryColumn(
        column.indices.to_numpy(),
        np.frombuffer(bounds, np.int32)[start : start + len(dictionary) + 1],
        # The buffer of an empty array may be None.
        np.frombuffer(data, np.uint8) if data else _NO_BYTES,
    )


def broken_list(rows: Rows, name: str) -> DataError:
    """Create a DataError for the first value whose size is not a multiple of 8 bytes."""
    lengths = pc.binary_length(_column(rows, name).cast(pa.large_binary())).fill_null(0).to_numpy()
    row = int((lengths % ID_BYTES != 0).argmax())
    return DataError(
        f"{place(rows, name, row)}: the value has {lengths[row]} bytes, not a multiple of "
        f"{ID_BYTES}, so the file is damaged. Write the file again"
    )


def dense_features(rows: Rows, names: tuple[str, ...]) -> Tensor:
    """Return columns of numbers as float32 or, for wider types, float64 ``[B, len(names)]``.

    Raises:
        DataError: a column is missing, contains a null, or does not contain numbers.
    """
    import torch

    columns = [_numbers(rows, name) for name in names]
    dtype = np.result_type(np.float32, *(each.dtype for each in columns))
    features = np.empty((len(rows), len(names)), dtype)
    for index, column in enumerate(columns):
        features[:, index] = column
    return torch.from_numpy(features)


def labels(rows: Rows, label: str | FeatureSchema) -> Tensor:
    """Return the label column, whose values are 0 or 1, as float32 ``[B]``.

    Args:
        rows: rows of a dataset.
        label: name of the label column, or the schema of the dataset. With ``schema.tasks``, the
            result is ``[B, T]`` with NaN for nulls.

    Raises:
        DataError: a column is missing, or a value is neither 0 nor 1 and has no task.
    """
    import torch

    if not isinstance(label, str):
        if label.tasks:
            return torch.stack([_task_labels(rows, name) for name in label.labels], dim=1)
        label = label.label
    name, numbers = label, _numbers(rows, label)
    # Checked before float32 rounds some to 1.
    wrong = (numbers != 0) & (numbers != 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{place(rows, name, row)}: the label is {_shown(_column(rows, name), row)}, "
            "expected 0 or 1. Fix or drop this row"
        )
    return torch.from_numpy(numbers.astype(np.float32))


def _task_labels(rows: Rows, name: str) -> Tensor:
    import torch

    column = _column(rows, name)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise _wrong_type(rows, name, column, "a number")
    numbers = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(numbers, np.float32))


def place(rows: Rows, column: str, row: int) -> str:
    """Format file, row and column for error messages. ``row`` is an index into ``rows``."""
    return f"{rows.place_of(row)}, column {column!r}"


def shown(rows: Rows, name: str, row: int, value: Any) -> str:
    """Format a row's stored value for error messages, or ``value`` if the column is missing."""
    if name not in rows.data.schema.names:
        return str(float(value))
    return _shown(_column(rows, name), row)


def _column(rows: Rows, name: str) -> Any:
    index = rows.data.schema.get_field_index(name)
    if index >= 0:
        return rows.data.column(index)
    names = rows.data.schema.names
    advice = (
        did_you_mean(name, names) or f". Use one of these columns: {', '.join(map(repr, names))}"
    )
    where = f"{rows.origins[0].path}: row {rows.origins[0].first_row}" if rows.origins else "data"
    raise DataError(f"{where}: there is no column {name!r}{advice}")


def _numbers(rows: Rows, name: str) -> NDArray[Any]:
    column = column_without_nulls(rows, name)
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise _wrong_type(rows, name, column, "a number")
    return column.to_numpy(zero_copy_only=False)


def _ids(items: Any) -> NDArray[np.int64]:
    return (items if items.type == pa.int64() else items.cast(pa.int64())).to_numpy()


def column_without_nulls(rows: Rows, name: str) -> pa.Array:
    """Return a column by name. Raises DataError if the column is missing or contains a null."""
    column = _column(rows, name)
    if column.null_count:
        raise DataError(
            f"{place(rows, name, _first_null(column))}: the value is null (pandas writes NaN as "
            "null). Replace it by a number, or by an empty list of ids"
        )
    return column


def _first_null(column: Any) -> int:
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())


def _wrong_type(rows: Rows, name: str, column: Any, expected: str) -> DataError:
    where = place(rows, name, 0) if len(rows) else f"column {name!r}"
    return DataError(
        f"{where}: the column has type {column.type}, expected {expected}. Convert the column"
    )


def _shown(column: Any, row: int) -> str:
    text = repr(column[row].as_py())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
