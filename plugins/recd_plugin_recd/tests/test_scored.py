"""Tables that are scored: every row in stored order, with the features of another table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.interactions import Interactions
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.api import DataError, Dataset


def table(rows: int, **more: list[Any]) -> pa.Table:
    ids = pa.array([[row] for row in range(rows)], pa.list_(pa.int64()))
    session = pa.array([row // 2 for row in range(rows)])
    columns = {"session_id": session, "ts": pa.array(range(rows)), "a": ids, **more}
    return pa.table({**columns, "number": pa.array([0.5] * rows, pa.float32())})


def trained(folder: Path, **options: Any) -> SessionParquet:
    pq.write_table(table(8, label=[0, 1] * 4), folder / "train.parquet")
    options = {"path": folder / "train.parquet", **options}
    return SessionParquet(SessionParquet.Options.model_validate(options))


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    return [row for rows in dataset.scan("train") for row in rows.data.to_pylist()]


@pytest.mark.parametrize("more", [{}, {"label": [None] * 7, "other": [[1]] * 7}])
def test_every_row_comes_in_stored_order(tmp_path: Path, more: dict[str, list[Any]]) -> None:
    """Whatever leaves rows out in training, and whatever columns there are besides."""
    dataset = trained(tmp_path, where=[["ts", "<", 3]], shuffle=True)
    (tmp_path / "new").mkdir()
    new = table(7, **more).select(["number", "a", "ts", "session_id", *more])
    pq.write_table(new.slice(0, 4), tmp_path / "new" / "a.parquet", row_group_size=3)
    pq.write_table(new.slice(4), tmp_path / "new" / "b.parquet")
    scored = dataset.to_score(str(tmp_path / "new"))
    scored.prepare()
    assert scored.schema() == dataset.schema()
    assert tuple(scored.keys()) == ("session_id", "ts")
    found = rows_of(scored)
    assert [row["ts"] for row in found] == list(range(7))
    assert [row["a"] for row in found] == [[row] for row in range(7)]
    assert {row["label"] for row in found} == {0}


def test_keys_are_those_that_are_there(tmp_path: Path) -> None:
    dataset = trained(tmp_path)
    pq.write_table(table(3).drop_columns(["session_id"]), tmp_path / "new.parquet")
    scored = dataset.to_score(str(tmp_path / "new.parquet"))
    assert tuple(scored.keys()) == ("ts",)
    assert scored.session_keys() is None
    assert len(rows_of(scored)) == 3


def test_a_feature_that_is_missing_is_named(tmp_path: Path) -> None:
    dataset = trained(tmp_path)
    pq.write_table(table(3).drop_columns(["a"]), tmp_path / "new.parquet")
    with pytest.raises(DataError, match=r"new.parquet: no column a, which .*train.parquet has"):
        dataset.to_score(str(tmp_path / "new.parquet")).prepare()


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("a", ["x", "y"], "is string, and ids in"),
        ("a", [0.5, 1.5], "is double, and ids in"),
        ("a", [["x"], ["y"]], r"is list<\w+: string>, and ids in"),
        ("number", ["x", "y"], "is string, and numbers in"),
        ("number", [[1.0], [2.0]], r"is list<\w+: double>, and numbers in"),
    ],
)
def test_a_feature_of_another_type_is_named(
    tmp_path: Path, column: str, values: list[Any], said: str
) -> None:
    dataset = trained(tmp_path)
    new = table(2).drop_columns([column]).append_column(column, pa.array(values))
    pq.write_table(new, tmp_path / "new.parquet")
    with pytest.raises(DataError, match=rf"new.parquet: column {column} {said} .*train.parquet"):
        dataset.to_score(str(tmp_path / "new.parquet")).prepare()


def test_events_come_in_the_order_of_their_file(tmp_path: Path) -> None:
    head = "user_id,item_id,timestamp"
    (tmp_path / "log.csv").write_text(f"{head},rating\n1,2,5,5\n2,3,6,1\n1,4,7,5\n")
    (tmp_path / "new.csv").write_text(f"{head}\n2,9,30\n1,8,20\n2,7,10\n")
    options = Interactions.Options(path=tmp_path / "log.csv", test_fraction=0.5)
    dataset = Interactions(options)
    scored = dataset.to_score(str(tmp_path / "new.csv"))
    scored.prepare()
    found = rows_of(scored)
    assert [row["item_id"] for row in found] == [[9], [8], [7]]
    assert [row["history_seen"] for row in found] == [[7], [], []]
    assert {row["label"] for row in found} == {0}
    with pytest.raises(DataError, match="no column rating"):
        Interactions(options.model_copy(update={"path": tmp_path / "new.csv"})).prepare()
