from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.data.number_rows import Numbers

from recd_plugins.data.list_dict import DECODED, list_dict_field, to_list_dict
from recd_plugins.data.rows import RowTable, rows_of_split
from recd_plugins.interfaces import Origin, Rows

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
