"""Layout ``list_dict``: Parquet stores each distinct id list of a row group once.

A value of the binary column is one row's list of little-endian int64 ids. Parquet's dictionary
encoding stores a code per row, which serves as the inverse indices of deduplicated rows. Field
metadata marks ``list_dict`` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

#: Storage type of a feature: list<int64>, or binary values for ``list_dict``.
Layout = Literal["list", "list_dict"]

ID_BYTES = 8
#: In-memory type of ``list_dict`` features.
DECODED = pa.dictionary(pa.int32(), pa.binary())
_MARK = {b"recd.layout": b"list_dict"}
_MAX_BYTES = 2**31 - 1


def list_dict_field(name: str) -> pa.Field:
    """Return the Parquet field of a feature that stores each distinct list of ids once."""
    return pa.field(name, pa.binary(), nullable=False, metadata=_MARK)


def decoded_field(field: pa.Field) -> pa.Field:
    """Return the in-memory field. A ``list_dict`` field becomes dictionary<int32, binary>."""
    return field.with_type(DECODED) if is_list_dict(field) else field


def is_list_dict(field: pa.Field) -> bool:
    """Return whether a stored or in-memory field has layout ``list_dict``."""
    kind = field.type.value_type if pt.is_dictionary(field.type) else field.type
    marked = (field.metadata or {}).items() >= _MARK.items()
    return marked and (pt.is_binary(kind) or pt.is_large_binary(kind))


def is_id_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list of integers that fit into int64."""
    return (
        (pt.is_list(kind) or pt.is_large_list(kind))
        and pt.is_integer(kind.value_type)
        and kind.value_type != pa.uint64()
    )


def id_features(schema: pa.Schema) -> list[str]:
    """Return the names of columns with lists of ids, plain or in layout ``list_dict``."""
    return [field.name for field in schema if is_list_dict(field) or is_id_list(field.type)]


def to_list_dict(lists: pa.Array) -> pa.Array:
    """Encode lists of integers as binary values of int64 ids. Does not copy int64 lists.

    Raises:
        ValueError: a list or an id is null, or the ids need more than 2 GiB.
    """
    items, offsets = lists.values, lists.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    items = items.slice(first, last - first)
    if lists.null_count or items.null_count:
        raise ValueError("the column has a null list or a null inside a list. Fill or drop nulls")
    if len(items) * ID_BYTES > _MAX_BYTES:
        raise ValueError(
            f"{len(items)} ids in {len(lists)} lists need more than 2 GiB, the limit of an Arrow "
            "binary column. Use fewer rows per row group"
        )
    ids = items.cast(pa.int64()).to_numpy()
    ends = ((offsets - first) * ID_BYTES).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(ids))]
    return pa.Array.from_buffers(pa.binary(), len(lists), buffers)


def to_lists(array: pa.Array) -> pa.Array:
    """Decode binary values, plain or dictionary-encoded, to list<int64>. Keeps nulls.

    Raises:
        ValueError: the size of a value is not a multiple of 8 bytes.
    """
    if pt.is_dictionary(array.type):
        # Index into lists, not into binary values, whose size is limited to 2 GiB.
        return to_lists(array.dictionary).take(array.indices)
    ids, offsets = _packed_ids(array)
    nulls = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids), mask=nulls)


def _packed_ids(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 ids of n binary values without a copy, and int32 offsets ``[n + 1]``."""
    _, bounds, data = array.buffers()
    wide = np.int64 if pt.is_large_binary(array.type) else np.int32
    if not len(array):
        return np.empty(0, np.int64), np.zeros(1, np.int32)
    ends = np.frombuffer(bounds, wide)[array.offset : array.offset + len(array) + 1]
    odd = (np.diff(ends) % ID_BYTES).nonzero()[0]
    if odd.size:
        row = int(odd[0])
        raise ValueError(
            f"the value in row {row} has {ends[row + 1] - ends[row]} bytes, not a multiple of "
            f"{ID_BYTES}"
        )
    first, last = int(ends[0]), int(ends[-1])
    count = (last - first) // ID_BYTES
    # The buffer of an empty array may be None.
    ids = np.frombuffer(data, np.int64, count, first) if count else np.empty(0, np.int64)
    return ids, ((ends - first) // ID_BYTES).astype(np.int32)


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches of one schema. Dictionaries of the result may contain duplicates."""
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
        # Neighbouring rows of a row group use neighbouring dictionary values.
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
