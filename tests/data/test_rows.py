"""Batches taken out of several others, all rows of a dataset, and the layout ``list_dict``."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.number_rows import Numbers

from recd_plugins.data.arrow import dictionary_column, sparse_column
from recd_plugins.data.list_dict import (
    DECODED,
    concat_batches,
    decoded_field,
    list_dict_field,
    to_list_dict,
    to_lists,
)
from recd_plugins.data.rows import RowTable, rows_of_split
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.runtime.errors import DataError

SCHEMA = pa.schema(
    [
        pa.field("number", pa.int64()),
        pa.field("ids", pa.list_(pa.int64())),
        list_dict_field("same_ids").with_type(DECODED),
    ]
)


def rows(first: int, *origins: Origin) -> Rows:
    """Six rows whose lists are their number's remainder by 3, in the layout ``list_dict`` too."""
    numbers = range(first, first + 6)
    lists = pa.array([[n % 3] * (n % 3) for n in numbers], pa.list_(pa.int64()))
    columns = [pa.array(numbers), lists, to_list_dict(lists).dictionary_encode().cast(DECODED)]
    return Rows(pa.record_batch(columns, schema=SCHEMA), origins)


@pytest.fixture
def table() -> RowTable:
    first = rows(0, Origin("a", 10, 4), Origin("b", 0, 2))
    return RowTable([first, rows(6, Origin("b", 2, 5), Origin("a", 0, 1))])


def test_rows_come_with_their_values_and_origins(table: RowTable) -> None:
    taken = table.take(np.array([11, 3, 4, 5, 6, 0]))
    assert len(table) == 12
    assert taken.data["number"].to_pylist() == [11, 3, 4, 5, 6, 0]
    assert taken.data["ids"].to_pylist() == [[2, 2], [], [1], [2, 2], [], []]
    origins = Origin("a", 0, 1), Origin("a", 13, 1), Origin("b", 0, 3), Origin("a", 10, 1)
    assert taken.origins == origins


def test_a_dictionary_keeps_what_its_rows_use(table: RowTable) -> None:
    taken = table.take(np.array([1, 7, 10, 4]))
    same = taken.data["same_ids"]
    assert taken.data.schema == SCHEMA
    assert [np.frombuffer(value, np.int64).tolist() for value in same.to_pylist()] == [[1]] * 4
    assert len(same.dictionary) <= 2, "one value of each part at most"


@pytest.mark.parametrize("batch_size", [1, 7, 64, 112, 8192])
def test_every_row_comes_once_in_stored_order(batch_size: int) -> None:
    numbers = Numbers(Numbers.Options(shuffle=False))
    batches = list(rows_of_split(numbers, "train", batch_size))
    found = [number for rows in batches for number in rows.data["number"].to_pylist()]
    assert found == list(range(112))
    assert len(batches[0]) == min(batch_size, 112)


IDS = pa.list_(pa.int64())
LISTS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=8)
FIELD = decoded_field(list_dict_field("history"))


def batch(dictionary: list[bytes], codes: list[int | None]) -> pa.RecordBatch:
    column = pa.DictionaryArray.from_arrays(
        pa.array(codes, pa.int32()), pa.array(dictionary, pa.binary())
    )
    return pa.record_batch([column], schema=pa.schema([FIELD]))


def rows_with(data: pa.RecordBatch) -> Rows:
    return Rows(data, (Origin("part-0.parquet", 100, data.num_rows),))


def packed(*ids: int) -> bytes:
    return b"".join(i.to_bytes(8, "little", signed=True) for i in ids)


def ids_of(column) -> list[list[int]]:
    values, offsets = column
    return [values[a:b].tolist() for a, b in pairwise(offsets)]


def test_a_value_is_the_ids_in_little_endian():
    values = to_list_dict(pa.array([[1, -2], [], [258]], IDS))
    assert values.to_pylist() == [b"\1" + bytes(7) + b"\xfe" + b"\xff" * 7, b"", b"\2\1" + bytes(6)]


@given(LISTS, st.integers(0, 3), st.booleans())
def test_there_and_back(lists, start, encode):
    part = pa.array(lists, IDS).slice(start)
    values = to_list_dict(part)
    assert to_lists(values.dictionary_encode() if encode else values).to_pylist() == lists[start:]


@pytest.mark.parametrize("lists", [[[1], None], [[1, None]]])
def test_nulls_are_refused(lists):
    with pytest.raises(ValueError, match="null"):
        to_list_dict(pa.array(lists, IDS))


def test_every_converter_can_read_it():
    data = batch([packed(1, 2), b"", packed(7)], [2, 0, 0, 1, 2])
    column = sparse_column(rows_with(data.slice(1)), "history")
    assert ids_of(column) == [[1, 2], [1, 2], [], [7]]


def test_bytes_that_are_no_ids_are_named():
    data = batch([packed(1), b"12345678901"], [0, 0, 1])
    with pytest.raises(DataError, match=r"part-0\.parquet: row 102 .*'history'.* 11 bytes"):
        sparse_column(rows_with(data), "history")


@settings(max_examples=50)
@given(st.lists(LISTS.filter(bool), min_size=1, max_size=4))
def test_dictionaries_are_joined_without_being_compared(parts):
    batches = [
        batch(*_encoded(lists)).slice(len(lists) // 2 if number else 0)
        for number, lists in enumerate(parts)
    ]
    expected = [
        ids for data in batches for ids in ids_of(sparse_column(rows_with(data), "history"))
    ]
    joined = concat_batches(batches)
    assert joined.schema == batches[0].schema
    assert ids_of(sparse_column(rows_with(joined), "history")) == expected


def _encoded(lists):
    distinct = list(dict.fromkeys(map(tuple, lists)))
    return [packed(*ids) for ids in distinct], [distinct.index(tuple(ids)) for ids in lists]


@pytest.mark.parametrize("codes", [pa.int8(), pa.int64()])
@pytest.mark.parametrize("values", [pa.binary(), pa.large_binary()])
def test_other_dictionaries_than_a_reader_yields_are_decoded(codes, values):
    """The kernels read codes and bounds as 32-bit integers, from their addresses."""
    lists = [[1, -2], [3], [], [3]]
    binary = to_list_dict(pa.array(lists, pa.list_(pa.int64()))).cast(values)
    column = binary.dictionary_encode().cast(pa.dictionary(codes, values))
    field = list_dict_field("a").with_type(column.type)
    rows_with = Rows(pa.record_batch([column], pa.schema([field])), (Origin("t.parquet", 0, 4),))
    assert dictionary_column(rows_with, "a") is None
    ids, offsets = sparse_column(rows_with, "a")
    assert [ids[first:last].tolist() for first, last in pairwise(offsets)] == lists
