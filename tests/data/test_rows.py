"""Batches taken out of several others, and every row of a dataset that cannot scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recd_plugins.data.list_dict import DECODED, list_dict_field, to_list_dict
from recd_plugins.data.rows import RowTable, rows_of_split
from recd_plugins.interfaces import Dataset, FeatureSchema, Origin, Reader, Rows, Split

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
    taken = table.take(np.array([11, 3, 4, 5, 6, 0]), {"some": 6})
    assert len(table) == 12
    assert taken.data["number"].to_pylist() == [11, 3, 4, 5, 6, 0]
    assert taken.data["ids"].to_pylist() == [[2, 2], [], [1], [2, 2], [], []]
    assert taken.groups == {"some": 6}
    origins = Origin("a", 0, 1), Origin("a", 13, 1), Origin("b", 0, 3), Origin("a", 10, 1)
    assert taken.origins == origins


def test_a_dictionary_keeps_what_its_rows_use(table: RowTable) -> None:
    taken = table.take(np.array([1, 7, 10, 4]), {})
    same = taken.data["same_ids"]
    assert taken.data.schema == SCHEMA
    assert [np.frombuffer(value, np.int64).tolist() for value in same.to_pylist()] == [[1]] * 4
    assert len(same.dictionary) <= 2, "one value of each part at most"


class Numbers(Dataset):
    """700 rows that are their number."""

    name = "acme.numbers"

    def prepare(self) -> None: ...

    def schema(self) -> FeatureSchema:
        return FeatureSchema((), ("number",), "label")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        assert (rank, world_size, split) == (0, 1, "train")
        return NumbersReader(batch_size)


class NumbersReader(Reader):
    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.batch = batch_size, 0

    def __len__(self) -> int:
        return 700 // self.batch_size

    def __iter__(self) -> Iterator[Rows]:
        while self.batch < len(self):
            first = self.batch * self.batch_size
            self.batch += 1
            numbers = pa.array(range(first, first + self.batch_size), pa.float32())
            data = pa.RecordBatch.from_pydict({"number": numbers, "label": numbers})
            yield Rows(data, (Origin("numbers", first, self.batch_size),))
        self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


@pytest.mark.parametrize("batch_size", [1, 7, 64, 512, 700, 8192])
def test_every_row_comes_once_in_stored_order(batch_size: int) -> None:
    batches = list(rows_of_split(Numbers(Numbers.Options()), "train", batch_size))
    numbers = [number for rows in batches for number in rows.data["number"].to_pylist()]
    assert numbers == list(range(700))
    assert len(batches[0]) == min(batch_size, 700)
