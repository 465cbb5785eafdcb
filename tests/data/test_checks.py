"""Ids outside their table and numbers that are not finite are named before they reach a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.small_registry import write_registry
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import load_registry
from recd_plugins.data.arrow import dense_features
from recd_plugins.data.checks import check_ids, check_numbers
from recd_plugins.data.loader import build_dataloader
from recd_plugins.interfaces import FeatureSchema, Origin, Rows
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

SCHEMA = FeatureSchema(sparse=("a", "b"), dense=("x", "price"), label="click")
NAN, INF = float("nan"), float("inf")


def rows_with(**columns: list[float]) -> Rows:
    zeros = {name: [0.0] * 4 for name in ("x", "price", "click")}
    data = pa.RecordBatch.from_pydict({**zeros, **columns})
    return Rows(data, (Origin("part-0.parquet", 100, 4),))


def batch_of_ids(lists: list[list[int]], form: str, dtype: torch.dtype = torch.int64) -> Batch:
    flat = [number for row in lists for number in row]
    kjt = KeyedJaggedTensor(
        keys=["large", "a"],
        values=torch.tensor([2**31 - 1] * len(lists) + flat, dtype=dtype),
        lengths=torch.tensor([1] * len(lists) + [len(row) for row in lists], dtype=torch.int32),
        stride=len(lists),
    )
    features = {
        "kjt": lambda: kjt,
        "ikjts": lambda: InverseKeyedJaggedTensor.from_kjt(kjt, [["large", "a"]]),
        "partials": lambda: (PartialInverseKeyedJaggedTensor.from_kjt(kjt),),
    }
    return Batch(torch.zeros(len(lists), 1), torch.zeros(len(lists)), **{form: features[form]()})


@pytest.mark.parametrize("form", ["kjt", "ikjts", "partials"])
@pytest.mark.parametrize(
    ("lists", "row", "wrong", "dtype"),
    [
        ([[1], [1], [2, 10, 11], [2, 10, 11]], 102, 10, torch.int64),
        ([[1], [1], [-1], []], 102, -1, torch.int32),
        ([[], [], [], [5] * 2000 + [10]], 103, 10, torch.int64),
        ([[10], [1], [10], [1]], 100, 10, torch.int32),
        ([[1, 2], [2, 3], [3, 10], [10, 4]], 102, 10, torch.int64),
    ],
)
def test_an_id_outside_is_named_with_its_first_row(lists, row, wrong, dtype, form):
    inside = [[min(abs(number), 9) for number in each] for each in lists]
    check_ids(batch_of_ids(inside, form, dtype), {"a": 10}, rows_with())
    check_ids(batch_of_ids(lists, form, dtype), {}, rows_with())
    titles = {"a": "r.yaml:5 preprocessing[0]: acme.hash"}
    with pytest.raises(DataError) as caught:
        check_ids(batch_of_ids(lists, form, dtype), {"a": 10}, rows_with(), titles)
    where = ("part-0.parquet", f"row {row} ", "'a'")
    for part in (*where, f"id is {wrong} after r.yaml:5", "acme.hash", "0 to 9"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("price", [1.0, 2.0, NAN, 3.0], "row 102 (from 0), column 'price': the value is nan"),
        ("price", [1.0, -INF, 2.0, 3.0], "row 101 (from 0), column 'price': the value is -inf"),
        ("price", [1e300, 0.0, 0.0, 0.0], "row 100 (from 0), column 'price': the value is 1e+300"),
        ("click", [0, 1, 1, NAN], "row 103 (from 0), column 'click': the label is nan"),
        ("click", [0, 1, 1, -1e-3], "row 103 (from 0), column 'click': the label is -0.001"),
        ("click", [0, 1, 1.5, 1], "row 102 (from 0), column 'click': the label is 1.5"),
    ],
)
def test_a_number_is_named_with_file_row_and_column(column, values, message):
    rows = rows_with(**{column: values})
    labels = torch.from_numpy(rows.data["click"].to_numpy().astype(np.float32))
    with pytest.raises(DataError) as caught:
        check_numbers(Batch(dense_features(rows, SCHEMA.dense), labels), SCHEMA, rows)
    assert f"part-0.parquet: {message}" in str(caught.value)


@pytest.mark.parametrize(("converter", "workers"), [("recd.ikjt", 1), ("recd.partial_ikjt", 0)])
def test_a_loader_names_the_value(tmp_path: Path, converter: str, workers: int) -> None:
    x = np.arange(32, dtype=np.float64)
    x[21] = 1e300
    columns = {"session_id": range(32), "ts": range(32), "x": x, "click": [0] * 32}
    table = pa.table({**columns, "ids": pa.array([[1, 2]] * 32, pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=16)
    options = {"path": f"{tmp_path}/part.parquet", "sparse": ["ids"], "label": "click"}
    registry = write_registry(
        tmp_path,
        dataset={"use": "recd.session_parquet", "options": options},
        converter={"use": converter},
        training={"batch_size": 8, "workers": workers},
    )
    loader = build_dataloader(load_registry(registry), rank=0, world_size=1)
    with pytest.raises(DataError, match=r"part.parquet: row 21 \(from 0\), column 'x'.* 1e\+300"):
        list(loader)
