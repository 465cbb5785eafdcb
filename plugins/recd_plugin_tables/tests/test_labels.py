"""Option ``label``: several labels of a row, with gaps, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from recd_plugin_tables.tests.helpers import table, write
from recd_plugins.api import DataError, arrow, tasks

COLUMNS = {"user": ["session", "id"], "item": "id"}
DATA: dict[str, Any] = {
    "user": [1, 1, 2, 2, 3, 3],
    "item": [1, 2, 3, 4, 5, 6],
    "click": [1, 0, None, 1, 1, 0],
    "stars": [5.0, 1.0, 3.0, None, 2.0, None],
    "seconds": [7.0, 0.0, 2.0, 0.0, None, 9.0],
}
LABELS: list[Any] = [
    "click",
    {"name": "good", "column": "stars", "positive_from": 3, "weight": 0.5},
    {"name": "stars", "type": "regression", "loss": "log_mse"},
    {"name": "watch", "column": "click", "type": "weighted", "value": "seconds"},
]


def labels_of(place: Path, label: object, **options: object) -> np.ndarray:
    dataset = table(place, label=label, columns=COLUMNS, order="stored", others="unused", **options)
    (rows,) = dataset.scan("train")
    return arrow.labels(rows, dataset.schema()).numpy()


def test_labels_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write(tmp_path / "t.parquet", DATA)
    dataset = table(place, label=LABELS, columns=COLUMNS, order="stored")
    dataset.prepare()
    schema, nan = dataset.schema(), math.nan
    assert schema.labels == ("click", "good", "stars", "watch")
    assert schema.tasks[2] == tasks.Task("stars", "regression", 1.0, "log_mse")
    expected: list[list[float]] = [
        [1, 1, 5, 7],
        [0, 0, 1, 0],
        [nan, 1, 3, nan],
        [1, nan, nan, nan],  # watched for 0 seconds
        [1, 0, 2, nan],
        [0, nan, nan, 0],
    ]
    np.testing.assert_array_equal(labels_of(place, LABELS), np.array(expected, np.float32))
    assert dataset.label_mean() is None
    means = {"click": 0.6, "good": 0.5, "stars": np.log1p([5, 1, 3, 2]).mean(), "watch": 7 / 9}
    assert dataset.task_means() == pytest.approx(means)
    said = "left out of its loss and metrics: 1 in 'click', 2 in 'good', 2 in 'stars', 3 in 'watch'"
    assert capsys.readouterr().err.count(said) == 1
    # A missing label may also drop the row, or be replaced.
    dropped = labels_of(place, [{"name": "click", "missing": "drop"}, LABELS[2]])
    assert dropped.shape == (5, 2)
    filled = labels_of(place, [{"name": "click", "missing": 0}, LABELS[2]])
    assert filled[:, 0].tolist() == [1, 0, 0, 1, 1, 0]


def test_one_label_is_a_column_of_role_label(tmp_path: Path) -> None:
    place = write(tmp_path / "t.parquet", DATA)
    plain = table(place, columns={**COLUMNS, "click": {"as": "label", "missing": "drop"}})
    one = table(place, label=[{"name": "click", "missing": "drop"}], columns=COLUMNS)
    assert one.options == plain.options
    assert one.schema() == plain.schema()
    for label in ("click", ["click"], {"name": "click"}):
        assert table(place, label=label, columns=COLUMNS).options.columns["click"].roles
    # One label of another type is a task.
    assert len(table(place, label=LABELS[2], columns=COLUMNS).schema().tasks) == 1


NOTE = {"name": "note", "type": "regression"}
SCORE = {"name": "score", "type": "regression", "loss": "log_mse"}


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (["click", "like"], "label 'like': the table has no column 'like'"),
        (["click", "gone"], "label 'gone' of column 'gone' is missing in every training row"),
        (["click", "stars"], "A label must be 0 or 1. Set positive_from"),
        (["click", NOTE], "row 1 (from 0), column 'note': the value is 'n/a'. The label must be a"),
        (["click", "note"], "a text label must be mapped to 0 and 1"),
        (["click", SCORE], "the value is -3.0. Label 'score' needs a finite number above -1"),
    ],
)
def test_labels_of_bad_columns(tmp_path: Path, label: Any, said: str) -> None:
    more = {
        "gone": [None] * 5 + [1],
        "note": ["1", "n/a", None, "2", "3", "4"],
        "score": [1.0, 2.0, -3.0, 1.0, 1.0, 1.0],
        "user": [1, 2, 3, 4, 5, 6],
    }
    place = write(tmp_path / "t.parquet", DATA | more | {"at": [1, 2, 3, 4, 5, 6]})
    use = {**COLUMNS, "at": "time"}
    split = {"by": "time", "test": 0.2}
    with pytest.raises(DataError) as error:
        table(place, label=label, columns=use, others="unused", split=split).prepare()
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label": ["a", "a"]}, "name 'a' is given twice"),
        ({"label": ["a", "user"]}, "columns.user: label 'user' uses this column"),
        ({"label": ["a", "b"], "implicit": True}, "implicit: true makes every row a positive"),
        ({"label": ["a", {"name": "b", "type": "weighted"}]}, "Set option 'value'"),
        ({"label": ["a", {"name": "b", "value": "c"}]}, "'value' applies only to type 'weighted'"),
        ({"label": ["a", {"name": "b", "loss": "mse"}]}, "loss 'mse' does not suit type 'binary'"),
        ({"label": ["a", "b"], "columns": {**COLUMNS, "c": "label"}}, "columns.c: option 'label' "),
    ],
)
def test_options_that_conflict(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        table(tmp_path / "t.parquet", **{"columns": COLUMNS, **options})
    assert said in str(error.value)
