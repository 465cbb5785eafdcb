"""Layout ``list_dict``: the ids of a row as one binary value, so that Parquet stores a list once.

A value holds the ids of one row, int64 little-endian. Parquet's dictionary encoding then stores the
distinct lists of a row group and a code for each row: ``inverse_lookup``, straight from storage.
Metadata of the field tells such a column from other binary data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

#: How the features of a table are stored: as list<int64>, or as above.
Layout = Literal["list", "list_dict"]

ID_BYTES = 8
#: What a feature in this layout is in memory, as readers hand it out.
DECODED = pa.dictionary(pa.int32(), pa.binary())
_MARK = {b"recd.layout": b"list_dict"}
_MAX_BYTES = 2**31 - 1


def list_dict_field(name: str) -> pa.Field:
    """Return the field of a feature in layout ``list_dict``, as a file has it."""
    return pa.field(name, pa.binary(), nullable=False, metadata=_MARK)


def decoded_field(field: pa.Field) -> pa.Field:
    """Return a field as readers yield it: ``list_dict`` as dictionary<int32, binary>."""
    return field.with_type(DECODED) if is_list_dict(field) else field


def is_list_dict(field: pa.Field) -> bool:
    """Return whether a field is in layout ``list_dict``, decoded to a dictionary or not."""
    kind = field.type.value_type if pt.is_dictionary(field.type) else field.type
    return is_marked(field) and (pt.is_binary(kind) or pt.is_large_binary(kind))


def is_marked(field: pa.Field) -> bool:
    """Return whether the metadata of a field calls it ``list_dict``, whatever its type is."""
    return (field.metadata or {}).items() >= _MARK.items()


def is_id_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list of integers that fit int64."""
    return (
        (pt.is_list(kind) or pt.is_large_list(kind))
        and pt.is_integer(kind.value_type)
        and kind.value_type != pa.uint64()
    )


def id_features(schema: pa.Schema) -> list[str]:
    """Return the columns that are lists of integers but uint64, in either layout."""
    return [field.name for field in schema if is_list_dict(field) or is_id_list(field.type)]


def to_list_dict(lists: pa.Array) -> pa.Array:
    """Return lists of integers as binary values; int64 is not copied.

    Raises:
        ValueError: a null, or more than 2 GiB of ids.
    """
    items, offsets = lists.values, lists.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    items = items.slice(first, last - first)
    if lists.null_count or items.null_count:
        raise ValueError("lists with nulls")
    if len(items) * ID_BYTES > _MAX_BYTES:
        raise ValueError(f"{len(items)} ids in {len(lists)} lists exceed the 2 GiB of a column")
    ids = items.cast(pa.int64()).to_numpy()
    ends = ((offsets - first) * ID_BYTES).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(ids))]
    return pa.Array.from_buffers(pa.binary(), len(lists), buffers)


def to_lists(array: pa.Array) -> pa.Array:
    """Return binary values or a dictionary of them as list<int64>; nulls stay.

    Raises:
        ValueError: a value whose bytes are no whole number of ids.
    """
    if pt.is_dictionary(array.type):
        # Lists are taken rather than bytes: 2 GiB of these are a quarter of a billion ids.
        return to_lists(array.dictionary).take(array.indices)
    ids, offsets = packed_ids(array)
    nulls = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids), mask=nulls)


def packed_ids(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of binary values, int64 and not copied, and offsets, int32 ``[n + 1]``."""
    _, bounds, data = array.buffers()
    wide = np.int64 if pt.is_large_binary(array.type) else np.int32
    if not len(array):
        return np.empty(0, np.int64), np.zeros(1, np.int32)
    ends = np.frombuffer(bounds, wide)[array.offset : array.offset + len(array) + 1]
    odd = (np.diff(ends) % ID_BYTES).nonzero()[0]
    if odd.size:
        row = int(odd[0])
        raise ValueError(
            f"value {row} has {ends[row + 1] - ends[row]} bytes, which is no whole number of ids "
            f"of {ID_BYTES} bytes"
        )
    first, last = int(ends[0]), int(ends[-1])
    count = (last - first) // ID_BYTES
    # A buffer of no bytes may be None.
    ids = np.frombuffer(data, np.int64, count, first) if count else np.empty(0, np.int64)
    return ids, ((ends - first) // ID_BYTES).astype(np.int32)


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches of one schema.

    Dictionaries are joined without comparing values, so that one may occur twice.
    """
    parts = zip(*(batch.columns for batch in batches), strict=True)
    columns = [
        _concat_dictionaries(arrays)
        if pt.is_dictionary(arrays[0].type)
        else pa.concat_arrays(arrays)
        for arrays in parts
    ]
    return pa.record_batch(columns, schema=batches[0].schema)


def _concat_dictionaries(arrays: Sequence[Any]) -> pa.Array:
    if any(array.null_count for array in arrays):
        return pa.concat_arrays(arrays)
    dictionaries, codes, size = [], [], 0
    for array in arrays:
        if not len(array):
            continue
        indices = array.indices.to_numpy()
        # Adjacent rows of a row group use adjacent values of its dictionary, or little more.
        first = int(indices.min())
        used = array.dictionary.slice(first, int(indices.max()) + 1 - first)
        dictionaries.append(used)
        codes.append(indices + np.int32(size - first))
        size += len(used)
    if not codes:
        return arrays[0]
    return pa.DictionaryArray.from_arrays(
        pa.array(np.concatenate(codes)), pa.concat_arrays(dictionaries), safe=False
    )
