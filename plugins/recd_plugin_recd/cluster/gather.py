"""Rows of many record batches in another order, without joining the batches first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_recd.cluster.arena import Arena, buffers_of
from recd_plugins.api.columns import copy_bytes, int32_at, prefetch_line

u64 = np.uint64
#: Rows between the one that is copied and the one that is fetched from memory meanwhile.
_AHEAD = 4
_MOST_ITEMS = 2**31 - 1


class Gather:
    """Takes rows out of ``batches``, which have one schema, by their number in all of them.

    Lists and strings without nulls, which are most of a table's bytes, are copied row by row
    straight from where they are; other columns are joined once, and held twice for that.

    Args:
        arena: where to put what is copied.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], schema: pa.Schema, arena: Arena) -> None:
        self._schema, self._arena = schema, arena
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])[:-1]
        self._columns = [
            _column([batch.column(index) for batch in batches], field.type)
            for index, field in enumerate(schema)
        ]

    def take(self, rows: NDArray[np.int64]) -> pa.RecordBatch:
        """These rows, in this order."""
        places = _Places(rows, self._starts)
        columns: list[Any] = [
            column.offsets(places)
            if isinstance(column, _JaggedColumn)
            else column.take(pa.array(rows))
            for column in self._columns
        ]
        jagged = {
            index: column
            for index, column in enumerate(self._columns)
            if isinstance(column, _JaggedColumn)
        }
        sizes = {index: column.size(columns[index]) for index, column in jagged.items()}
        buffers = buffers_of(self._arena, sizes.values())
        for (index, column), buffer in zip(jagged.items(), buffers, strict=True):
            columns[index] = column.take(places, columns[index], buffer)
        return pa.record_batch(columns, schema=self._schema)


def copied_share(batch: pa.RecordBatch) -> float:
    """The share of a batch's bytes in columns that ``Gather`` joins."""
    joined = sum(
        column.nbytes for column in batch.columns if _item_bytes([column], column.type) is None
    )
    return joined / max(1, batch.nbytes)


class _Places:
    """Rows by batch and by row in it, int32 ``[rows]`` each."""

    def __init__(self, rows: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        self.batches = (np.searchsorted(starts, rows, "right") - 1).astype(np.int32)
        self.rows = (rows - starts[self.batches]).astype(np.int32)


class _JaggedColumn:
    """A column of lists or strings in several chunks; ``item`` is the bytes of an item."""

    def __init__(self, chunks: list[pa.Array], kind: pa.DataType, item: int) -> None:
        self._chunks, self._kind, self._item = chunks, kind, item
        self._offsets = np.array([_offsets(chunk) for chunk in chunks], np.int64)
        self._items = np.array([_items(chunk, item) for chunk in chunks], np.int64)

    def offsets(self, places: _Places) -> NDArray[np.int32]:
        """The offsets of the column that ``take`` will make."""
        offsets = np.empty(len(places.rows) + 1, np.int32)
        size = int(_new_offsets(self._offsets, places.batches, places.rows, offsets))
        if size > _MOST_ITEMS:
            raise OverflowError(f"{len(places.rows)} rows with {size} items in one column")
        return offsets

    def size(self, offsets: NDArray[np.int32]) -> int:
        """Bytes of the items."""
        return int(offsets[-1]) * self._item

    def take(self, places: _Places, offsets: NDArray[np.int32], target: pa.Buffer) -> pa.Array:
        """The rows of ``places``, their items in ``target``."""
        _copy_items(
            self._offsets,
            self._items,
            places.batches,
            places.rows,
            self._item,
            offsets,
            target.address,
        )
        num_rows, bounds = len(places.rows), pa.py_buffer(offsets)
        if not pt.is_list(self._kind):
            return pa.Array.from_buffers(self._kind, num_rows, [None, bounds, target], 0)
        item = self._kind.value_type
        items = pa.Array.from_buffers(item, int(offsets[-1]), [None, target], 0)
        return pa.Array.from_buffers(self._kind, num_rows, [None, bounds], 0, children=[items])


def _column(chunks: list[pa.Array], kind: pa.DataType) -> Any:
    """Something with a method ``take``."""
    item = _item_bytes(chunks, kind)
    if item is not None:
        return _JaggedColumn(chunks, kind, item)
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _item_bytes(chunks: list[pa.Array], kind: pa.DataType) -> int | None:
    """Bytes of an item of lists or strings without nulls; None for any other column."""
    if any(chunk.null_count for chunk in chunks):
        return None
    if pt.is_string(kind) or pt.is_binary(kind):
        return 1
    if not pt.is_list(kind):
        return None
    item = kind.value_type
    fixed = pt.is_integer(item) or pt.is_floating(item) or pt.is_timestamp(item)
    if not fixed or any(chunk.values.null_count for chunk in chunks):
        return None
    return int(item.bit_width // 8)


def _offsets(chunk: pa.Array) -> int:
    """Address of the offset of the first row."""
    buffer = chunk.buffers()[1]
    return 0 if buffer is None else int(buffer.address) + 4 * chunk.offset


def _items(chunk: pa.Array, item: int) -> int:
    """Address of the item that offset 0 means."""
    if not pt.is_list(chunk.type):
        buffer, skip = chunk.buffers()[2], 0
    else:
        values = chunk.values
        buffer, skip = values.buffers()[1], values.offset
    return 0 if buffer is None else int(buffer.address) + item * skip


@numba.njit(nogil=True, cache=True)
def _new_offsets(addresses: Any, batches: Any, in_batch: Any, offsets: Any) -> Any:
    """Fill ``offsets``; returns the number of items, which may be too large for them."""
    total = np.int64(0)
    offsets[0] = 0
    for row in range(len(batches)):
        bounds = int32_at(addresses[batches[row]])
        at = u64(in_batch[row])
        total += np.int64(bounds[at + u64(1)]) - np.int64(bounds[at])
        offsets[row + 1] = np.int32(total)
    return total


@numba.njit(nogil=True, cache=True)
def _copy_items(
    addresses: Any,
    items: Any,
    batches: Any,
    in_batch: Any,
    item: Any,
    offsets: Any,
    target: Any,
) -> None:
    num_rows = len(batches)
    for row in range(num_rows):
        if row + _AHEAD < num_rows:
            batch = batches[row + _AHEAD]
            ahead = np.int64(int32_at(addresses[batch])[u64(in_batch[row + _AHEAD])])
            prefetch_line(items[batch] + ahead * item)
        batch = batches[row]
        start = np.int64(int32_at(addresses[batch])[u64(in_batch[row])])
        size = np.int64(offsets[row + 1]) - np.int64(offsets[row])
        copy_bytes(target + np.int64(offsets[row]) * item, items[batch] + start * item, size * item)
