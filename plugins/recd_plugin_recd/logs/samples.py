"""Rows of an Arrow schema as bytes, one row after the other, and back.

A row is a head of the same size in every row, then the bytes of its lists and strings in the order
of the columns. The head holds, all little-endian:

1. a bit for each column, 1 where the value is null, lowest bit first, filled up to whole bytes;
2. the values of columns of fixed width, in the order of the columns; a bool is one byte;
3. the lengths of lists (in items) and of strings and binaries (in bytes), int32, in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.logs.data_errors import ColumnError, RowError
from recd_plugin_recd.logs.sample_kernels import copy_segments
from recd_plugins.api import DataError

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class _Column:
    """How one column is stored: ``width`` is the bytes of a value, or of an item of a list."""

    name: str
    type: pa.DataType
    width: int
    is_list: bool
    is_string: bool

    @property
    def is_variable(self) -> bool:
        return self.is_list or self.is_string

    @property
    def offset_type(self) -> type[np.int32] | type[np.int64]:
        kind = self.type
        is_large = (
            pa.types.is_large_list(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_large_binary(kind)
        )
        return np.int64 if is_large else np.int32


class SampleCodec:
    """Turns record batches of ``schema`` into rows of bytes and back.

    Columns are numbers, bools, dates, times, strings, binaries, and lists of any of the first
    four; nulls are kept, except inside lists.

    Raises:
        ColumnError: a column is of another type.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._columns = [_column(field) for field in schema]
        self._bitmap = -(-len(self._columns) // 8)
        self._fixed = [column for column in self._columns if not column.is_variable]
        self._variable = [column for column in self._columns if column.is_variable]
        self._lengths_at = self._bitmap + sum(column.width for column in self._fixed)
        self._head = self._lengths_at + 4 * len(self._variable)

    def row_sizes(self, batch: pa.RecordBatch) -> Int64s:
        """Bytes of each row, int64 ``[rows]``."""
        sizes = np.full(batch.num_rows, self._head, np.int64)
        for column in self._variable:
            sizes += _segments(batch.column(column.name), column)[1]
        return sizes

    def encode(self, batch: pa.RecordBatch) -> tuple[Bytes, Int64s]:
        """The rows' bytes, and where each row starts, int64 ``[rows + 1]``.

        Raises:
            DataError: a list has a null inside.
        """
        rows = batch.num_rows
        heads = np.zeros((rows, self._head), np.uint8)
        at, lengths_at = self._bitmap, self._lengths_at
        segments = []
        sizes = np.full(rows, self._head, np.int64)
        for index, column in enumerate(self._columns):
            array = batch.column(column.name)
            if array.null_count:
                null = array.is_null().to_numpy(zero_copy_only=False)
                heads[:, index // 8] |= null.astype(np.uint8) << np.uint8(index % 8)
            if column.is_variable:
                found = _segments(array, column)
                items = (found[1] // column.width).astype("<i4")
                heads[:, lengths_at : lengths_at + 4] = items.view(np.uint8).reshape(rows, 4)
                lengths_at += 4
                sizes += found[1]
                segments.append(found)
            else:
                heads[:, at : at + column.width] = _fixed_bytes(array, column)
                at += column.width
        offsets = np.zeros(rows + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        out = np.empty(int(offsets[-1]), np.uint8)
        ends = offsets[:-1].copy()
        _append(heads.ravel(), np.arange(rows) * self._head, np.full(rows, self._head), out, ends)
        for starts, lengths, values in segments:
            _append(values, starts, lengths, out, ends)
        return out, offsets

    def decode(self, data: Bytes, offsets: Int64s) -> pa.RecordBatch:
        """The record batch of rows that lie in ``data`` at ``offsets``, int64 ``[rows + 1]``.

        Raises:
            DataError: the bytes are not rows of this schema; names the row, counted from 0.
        """
        rows = len(offsets) - 1
        sizes = np.diff(offsets)
        if rows and (sizes < self._head).any():
            raise _no_row(int((sizes < self._head).argmax()))
        heads = np.empty((rows, self._head), np.uint8)
        head_sizes = np.full(rows, self._head)
        copy_segments(
            data, offsets[:-1], heads.reshape(-1), np.arange(rows) * self._head, head_sizes
        )
        lengths = heads[:, self._lengths_at :].copy().view("<i4").astype(np.int64)
        lengths = lengths.reshape(rows, len(self._variable))
        lengths *= np.array([column.width for column in self._variable], np.int64)
        wrong = (lengths < 0).any(1) | (lengths.sum(1) + self._head != sizes)
        if wrong.any():
            raise _no_row(int(wrong.argmax()))
        arrays, at, number = [], self._bitmap, 0
        starts = offsets[:-1] + self._head
        for index, column in enumerate(self._columns):
            null = ((heads[:, index // 8] >> np.uint8(index % 8)) & 1).astype(np.uint8)
            if column.is_variable:
                taken = lengths[:, number]
                arrays.append(_variable_array(column, data, starts, taken, null))
                starts = starts + taken
                number += 1
            else:
                values = np.ascontiguousarray(heads[:, at : at + column.width])
                arrays.append(_fixed_array(column, values, null))
                at += column.width
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _column(field: pa.Field) -> _Column:
    kind, types = field.type, pa.types
    if types.is_string(kind) or types.is_binary(kind):
        return _Column(field.name, kind, 1, is_list=False, is_string=True)
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return _Column(field.name, kind, 1, is_list=False, is_string=True)
    is_list = types.is_list(kind) or types.is_large_list(kind)
    item = kind.value_type if is_list else kind
    is_number = types.is_integer(item) or types.is_floating(item) or types.is_temporal(item)
    if types.is_boolean(item) and not is_list:
        return _Column(field.name, kind, 1, is_list=False, is_string=False)
    if not is_number or types.is_interval(item):
        raise ColumnError(
            f"column {field.name!r} of type {kind} has no row-wise form; "
            "write record batches (--record batch) instead"
        )
    return _Column(field.name, kind, item.bit_width // 8, is_list=is_list, is_string=False)


def _no_row(row: int) -> DataError:
    return DataError(f"row {row} is no row of this schema: its lengths do not add up")


def _append(source: Bytes, starts: Int64s, lengths: Int64s, out: Bytes, ends: Int64s) -> None:
    """Add a segment to each row of ``out``, and move ``ends`` on."""
    copy_segments(source, starts, out, ends, lengths)
    ends += lengths


def _buffer(buffer: pa.Buffer | None) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)


def _fixed_bytes(array: Any, column: _Column) -> Bytes:
    """uint8 ``[rows, width]``, zeros where the value is null."""
    if pa.types.is_boolean(column.type):
        return array.fill_null(False).cast(pa.uint8()).to_numpy()[:, None]
    first, rows, width = array.offset, len(array), column.width
    data = _buffer(array.buffers()[1])[first * width : (first + rows) * width]
    data = data.reshape(rows, width)
    if array.null_count:
        data = data * array.is_valid().to_numpy(zero_copy_only=False)[:, None].astype(np.uint8)
    return data


def _segments(array: Any, column: _Column) -> tuple[Int64s, Int64s, Bytes]:
    """Start and length in bytes of each row's list or string, and the bytes they lie in.

    Raises:
        DataError: a list has a null inside.
    """
    width, first, rows = column.width, array.offset, len(array)
    offsets = _buffer(array.buffers()[1]).view(column.offset_type)[first : first + rows + 1]
    offsets = offsets.astype(np.int64) if len(offsets) else np.zeros(rows + 1, np.int64)
    lengths = np.diff(offsets) * width
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    if column.is_string:
        return offsets[:-1], lengths, _buffer(array.buffers()[2])
    items = array.values
    used = items.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if used.null_count:
        null = int(used.is_null().to_numpy(zero_copy_only=False).argmax())
        raise RowError(
            int(np.searchsorted(offsets, offsets[0] + null, "right")) - 1,
            f"column {column.name!r}: a null inside a list has no row-wise form; "
            "write record batches (--record batch) instead",
        )
    return (offsets[:-1] + items.offset) * width, lengths, _buffer(items.buffers()[1])


def _validity(null: Bytes) -> pa.Buffer | None:
    return pa.py_buffer(np.packbits(null == 0, bitorder="little")) if null.any() else None


def _fixed_array(column: _Column, values: Bytes, null: Bytes) -> pa.Array:
    if pa.types.is_boolean(column.type):
        return pa.array(values[:, 0] != 0, mask=null != 0)
    return pa.Array.from_buffers(
        column.type, len(values), [_validity(null), pa.py_buffer(values.reshape(-1))]
    )


def _variable_array(
    column: _Column, data: Bytes, starts: Int64s, lengths: Int64s, null: Bytes
) -> pa.Array:
    rows = len(lengths)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = np.empty(int(offsets[-1]), np.uint8)
    copy_segments(data, starts, values, offsets[:-1], lengths)
    counts = pa.py_buffer((offsets // column.width).astype(column.offset_type))
    buffers = [_validity(null), counts]
    if column.is_string:
        return pa.Array.from_buffers(column.type, rows, [*buffers, pa.py_buffer(values)])
    items = pa.Array.from_buffers(
        column.type.value_type, len(values) // column.width, [None, pa.py_buffer(values)]
    )
    return pa.Array.from_buffers(column.type, rows, buffers, children=[items])
