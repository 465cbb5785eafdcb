"""Numbers that are not finite are refused before they reach a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import load_registry
from recd_plugins.data.arrow import dense_features
from recd_plugins.data.checks import check_numbers
from recd_plugins.data.loader import build_dataloader
from recd_plugins.interfaces import FeatureSchema, Origin, Rows
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse import InverseKeyedJaggedTensor

SCHEMA = FeatureSchema(sparse=("a", "b"), dense=("x", "price"), label="click")
NUM_ROWS = 4


def rows_with(**columns: list[float]) -> Rows:
    """Rows 100 to 103 of a file."""
    zeros = {name: [0.0] * NUM_ROWS for name in ("x", "price", "click")}
    data = pa.RecordBatch.from_pydict({**zeros, **columns})
    return Rows(data, (Origin("part-0.parquet", 100, NUM_ROWS),))


def batch_of(rows: Rows) -> Batch:
    numbers = torch.from_numpy(rows.data["click"].to_numpy().astype(np.float32))
    return Batch(dense_features(rows, SCHEMA.dense), numbers)


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf"), (1e300, "1e+300")],
)
def test_a_dense_value_is_named_with_file_row_and_column(value: float, text: str) -> None:
    rows = rows_with(price=[1.0, 2.0, value, 3.0])
    with pytest.raises(DataError) as caught:
        check_numbers(batch_of(rows), SCHEMA, rows)
    assert str(caught.value).startswith(
        f"part-0.parquet: row 102 (from 0), column 'price': the value is {text}"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3, 1.5])
def test_labels_that_the_loss_does_not_take_are_refused(value: float) -> None:
    rows = rows_with(click=[0, 1, 1, value])
    with pytest.raises(DataError) as caught:
        check_numbers(batch_of(rows), SCHEMA, rows)
    expected = f"row 103 (from 0), column 'click': the label is {value}"
    assert expected in str(caught.value)


def test_what_a_converter_made_of_a_right_value_is_told() -> None:
    rows = rows_with(click=[0, 1, 1, 1], price=[0.1, 0.2, 0.3, 0.4])
    batch = batch_of(rows)
    batch.labels[2] = 2
    with pytest.raises(DataError, match=r"label is 1(\.0)?, which became 2\.0, expected 0 or 1"):
        check_numbers(batch, SCHEMA, rows)
    batch.dense_features[1, 1] = float("nan")
    with pytest.raises(DataError, match=r"'price': the value is 0\.2, which became nan; dense"):
        check_numbers(batch, SCHEMA, rows)


@pytest.mark.parametrize("deduplicated", [False, True])
def test_a_weight_is_named_with_its_feature_and_row(deduplicated: bool) -> None:
    weights = torch.ones(8)
    weights[6] = float("nan")
    kjt = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 1, 2, 3, 1, 1, 5, 6]),
        lengths=torch.tensor([1, 1, 0, 2, 1, 1, 2, 0]),
        weights=weights,
    )
    zeros = torch.zeros(NUM_ROWS, 2), torch.zeros(NUM_ROWS)
    if deduplicated:
        ikjts = tuple(InverseKeyedJaggedTensor.from_kjt(kjt, [["a", "b"]]))
        batch = Batch(*zeros, ikjts=ikjts)
    else:
        batch = Batch(*zeros, kjt)
    with pytest.raises(DataError, match=r"row 102 .*'b': an id has the weight nan"):
        check_numbers(batch, SCHEMA, rows_with())


REGISTRY = """
version: 1
dataset: {{use: recd.session_parquet, options: {{path: {path}, dense: [x], sparse: [ids],
  label: click, session: session_id, timestamp: ts}}}}
converter: {{use: {converter}}}
training: {{batch_size: 8, workers: {workers}}}
"""


@pytest.mark.parametrize(
    ("converter", "workers"),
    [("recd.ikjt", 0), ("recd.ikjt", 1), ("recd.partial_ikjt", 0), ("recd.list_dict", 0)],
)
def test_a_loader_names_the_value_whatever_reads_it(
    tmp_path: Path, converter: str, workers: int
) -> None:
    count = 32
    x = np.arange(count, dtype=np.float64)
    x[21] = 1e300
    table = pa.table(
        {
            "session_id": np.arange(count),
            "ts": np.arange(count),
            "x": x,
            "ids": pa.array([[1, 2]] * count, pa.list_(pa.int64())),
            "click": np.zeros(count, np.int64),
        }
    )
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=16)
    registry = tmp_path / "registry.yaml"
    text = REGISTRY.format(path=tmp_path / "part.parquet", converter=converter, workers=workers)
    registry.write_text(text, encoding="utf-8")
    loader = build_dataloader(load_registry(registry), rank=0, world_size=1)
    with pytest.raises(DataError, match=r"part.parquet: row 21 \(from 0\), column 'x'.* 1e\+300"):
        list(loader)
