"""Every row of a dataset that cannot scan, whatever its batches are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from recd_plugins.data.rows import rows_of_split
from recd_plugins.interfaces import Dataset, FeatureSchema, Origin, Reader, Rows, Split
from recd_plugins.runtime.errors import DataError

NUM_ROWS = 700


class Numbers(Dataset):
    """Rows that are their number."""

    name = "acme.numbers"

    def prepare(self) -> None: ...

    def schema(self) -> FeatureSchema:
        return FeatureSchema((), ("number",), "label")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        assert (rank, world_size, split) == (0, 1, "train")
        if batch_size > NUM_ROWS:
            raise DataError("too few rows")
        return NumbersReader(batch_size)


class NumbersReader(Reader):
    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.batch = batch_size, 0

    def __len__(self) -> int:
        return NUM_ROWS // self.batch_size

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


@pytest.mark.parametrize("batch_size", [1, 7, 64, 512, NUM_ROWS, 8192])
def test_every_row_comes_once_in_stored_order(batch_size: int) -> None:
    batches = list(rows_of_split(Numbers(Numbers.Options()), "train", batch_size))
    numbers = [number for rows in batches for number in rows.data["number"].to_pylist()]
    assert numbers == list(range(NUM_ROWS))
    assert len(batches[0]) == min(batch_size, NUM_ROWS)
