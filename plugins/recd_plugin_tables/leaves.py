"""Leaves: what a table's columns hold once structs are taken apart, by dotted name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

# Few of Arrow's functions take views, which Polars writes.
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


@dataclass(frozen=True)
class Leaf:
    """A column without fields, or a field of one.

    Attributes:
        name: of the column, and the fields below it: ``user.age``.
        type: of a row: of lists of structs each field is a list.
        path: the column and the fields.
        exploded: whether each element of its column's lists is a row.
    """

    name: str
    type: pa.DataType
    path: tuple[str, ...]
    exploded: bool = False


def leaves(schema: pa.Schema, explode: Collection[str] = ()) -> list[Leaf]:
    """The leaves of all columns in order; those of ``explode`` by what an element of theirs is."""
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
    """Paths below a value, and what is there."""
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
    """A leaf of its column, whose lists were taken apart where it is exploded."""
    return _at(normal(column), leaf.path[1:])


def _at(values: pa.Array, path: tuple[str, ...]) -> pa.Array:
    if not path:
        return values
    if pt.is_struct(values.type):
        return _at(normal(pc.struct_field(values, path[0])), path[1:])
    # A list of structs: the field of every element in lists of the same lengths.
    offsets, items, empty = list_parts(values)
    return pa.ListArray.from_arrays(pa.array(offsets), _at(items, path), mask=empty)


def list_parts(values: pa.Array) -> tuple[NDArray[np.int32], pa.Array, pa.BooleanArray]:
    """Offsets of lists of any sort from 0, the elements of all of them, and which are null."""
    values = normal(values)
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return offsets, normal(values.flatten()), values.is_null()


def normal(values: pa.Array) -> pa.Array:
    """The same values without an extension type and without runs, none as views.

    A dictionary stays one where its values are as plain as that.
    """
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
    """What a type stores, without how: no extension, no dictionary, no runs, no view."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if pt.is_dictionary(kind) or pt.is_run_end_encoded(kind):
        return plain(kind.value_type)
    return _VIEWS.get(kind, kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists, of any sort."""
    return bool(
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )
