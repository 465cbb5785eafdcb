"""Tables that a dataset ``tables.table`` scores: ids are those that training has."""

from __future__ import annotations

import gzip
import pickle
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_tables.tests.helpers import COLUMNS, by_row, clicks, rows_of, table
from recd_plugin_tables.values import text_id
from recd_plugins.runtime.errors import DataError


def test_another_table_is_scored_by_the_same_ids(path, tmp_path):
    new = clicks(20).drop_columns("clicked").append_column("extra", [["x"] * 20])
    new = new.set_column(0, "user", [["unknown"] * 20])
    pq.write_table(new, tmp_path / "new.parquet")
    data = table(path, split={"by": "time", "test": 0.2})
    scored = pickle.loads(pickle.dumps(data.to_score(str(tmp_path / "new.parquet"))))
    scored.prepare()
    assert scored.splits() == ("train",)
    found = rows_of(scored)
    assert found["_row"] == list(range(20))
    assert found["clicked"] == [0] * 20
    assert found["history"] == by_row(table(path))["history"][:20]
    pq.write_table(new.drop_columns(["user", "when"]), tmp_path / "new.parquet")
    bare = table(path, columns={**COLUMNS, "user": "session"})
    nobody = bare.to_score(str(tmp_path / "new.parquet"))
    assert rows_of(nobody)["_row"] == list(range(20))
    assert nobody.keys() == {}
    pq.write_table(new.drop_columns("history"), tmp_path / "new.parquet")
    with pytest.raises(DataError, match=r"new.parquet: the table has no column 'history'"):
        data.to_score(str(tmp_path / "new.parquet")).prepare()


def test_without_the_table_that_was_trained_on_its_columns_are_known(tmp_path):
    new = clicks(20).append_column("vector", [[[0.5, 1.0]] * 20])
    new = new.append_column("vector_9", [[0.25] * 20])
    pq.write_table(new, tmp_path / "new.parquet")
    columns = {**COLUMNS, "vector": "numbers", "vector_9": "number"}
    trained = table(tmp_path / "new.parquet", columns=columns)
    gone = table(tmp_path / "gone.parquet", columns=columns)
    gone.trained_schema = trained.schema()
    assert gone.trained_schema.dense[-3:] == ("vector_0", "vector_1", "vector_9")
    scored = pickle.loads(pickle.dumps(gone.to_score(str(tmp_path / "new.parquet"))))
    assert scored.schema() == trained.schema()
    assert rows_of(scored) == rows_of(trained.to_score(str(tmp_path / "new.parquet")))
    assert gone.texts("user") == {}
    assert trained.kinds()["history"] == "lists of text"
    assert gone.kinds() == {}
    gone.trained_kinds = {**trained.kinds(), "item": "text"}
    message = r"'item' contains numbers, but text in .*gone.parquet"
    with pytest.raises(DataError, match=message):
        gone.to_score(str(tmp_path / "new.parquet")).prepare()


def test_a_column_of_folders_names_that_a_file_lacks_is_told(tmp_path):
    (tmp_path / "old" / "day=1").mkdir(parents=True)
    (tmp_path / "old" / "day=1" / "a.csv").write_text("item,clicked\n1,1\n2,0\n")
    (tmp_path / "new.csv").write_text("item\n1\n")
    data = table(tmp_path / "old", columns={"item": "id", "day": "id", "clicked": "label"})
    with pytest.raises(DataError, match=r"no column 'day', which the model needs. Add .*: 'item'"):
        data.to_score(str(tmp_path / "new.csv")).prepare()
    (tmp_path / "day=1").mkdir()
    (tmp_path / "new.csv").rename(tmp_path / "day=1" / "new.csv")
    scored = data.to_score(str(tmp_path / "day=1"))
    assert rows_of(scored)["day"] == [[1]]


def test_ids_of_another_type_than_in_training_are_not_scored(path, tmp_path):
    new = clicks(20)
    pq.write_table(new.set_column(2, "item", new["item"].cast("string")), tmp_path / "new.parquet")
    message = r"'item' contains text, but numbers in .*clicks.parquet. Store"
    with pytest.raises(DataError, match=message):
        table(path).to_score(str(tmp_path / "new.parquet")).prepare()
    with pytest.raises(DataError, match=message):
        table(path, test_path=tmp_path / "new.parquet").prepare()


@pytest.mark.parametrize(
    ("use", "old", "text", "message"),
    [
        ("ids", [[1], [2]], 'a\n"[1, 2]"\n', "as lists of numbers, in Parquet or JSON lines"),
        ("number", [1.5, 2], "a,b\n1.5,\n,\nn/k,\n", r"first text is 'n/k' in row 2 \(from 0\)"),
    ],
)
def test_text_where_training_has_lists_or_numbers_is_told(tmp_path, use, old, text, message):
    pq.write_table(pa.table({"a": old, "clicked": [0, 1]}), tmp_path / "old.parquet")
    (tmp_path / "new.csv").write_text(text)
    trained = table(tmp_path / "old.parquet", columns={"a": use, "clicked": "label"})
    with pytest.raises(DataError, match=message):
        trained.to_score(str(tmp_path / "new.csv")).prepare()


def test_digits_of_a_file_without_types_are_text_where_training_has_text(tmp_path):
    when = {"as": ["time", "id"], "by": "hour"}
    uses = {"zip": "id", "item": "id", "clicked": "label", "when": when}
    old = {"zip": ["0012", "x"], "item": [1, 2], "clicked": [0, 1]}
    old["when"] = ["2026-01-01 01:00"] * 2
    pq.write_table(pa.table(old), tmp_path / "old.parquet")
    (tmp_path / "new.csv").write_text("item,zip,when\n3,0012,2026-01-01 04:00\n")
    data = table(tmp_path / "old.parquet", columns=uses)
    found = rows_of(data.to_score(str(tmp_path / "new.csv")))
    assert found["zip"] == [[text_id("0012")]]
    assert found["when"] == [[4]]
    folder = tmp_path / "parts"
    for name in ("0012", "x"):
        (folder / f"zip={name}").mkdir(parents=True)
        pq.write_table(pa.table(old).drop_columns("zip"), folder / f"zip={name}" / "a.parquet")
    data = table(folder, columns=uses)
    assert by_row(data)["zip"] == [[text_id("0012")]] * 2 + [[text_id("x")]] * 2
    found = rows_of(data.to_score(str(folder / "zip=0012")))
    assert found["zip"] == [[text_id("0012")]] * 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"format": "tsv", "header": ["clicked", "item"]}, "0\t3\n1\t4\n"),
        ({"format": "csv", "separator": "\\t"}, "clicked\titem\n0\t3\n1\t4\n"),
        ({"format": "jsonl"}, '{"clicked": 0, "item": 3}\n{"clicked": 1, "item": 4}\n'),
    ],
)
def test_a_table_to_score_is_opened_as_in_training(tmp_path, source, text):
    for name in ("old.txt", "new.log", "new.csv"):
        (tmp_path / name).write_text(text)
    data = table(tmp_path / "old.txt", columns={"item": "id", "clicked": "label"}, source=source)
    assert rows_of(data)["item"] == [[3], [4]]
    (tmp_path / "new.csv.gz").write_bytes(gzip.compress(text.encode()))
    pq.write_table(pa.table({"clicked": [0, 1], "item": [3, 4]}), tmp_path / "old.parquet")
    names = ["new.log", "new.csv", "new.csv.gz", "old.parquet"]  # the last one by its suffix
    for name in names[: 1 if source["format"] == "jsonl" else 4]:
        assert rows_of(data.to_score(str(tmp_path / name)))["item"] == [[3], [4]]
    data = table(tmp_path / "old.parquet", columns={"item": "id", "clicked": "label"})
    with pytest.raises(DataError, match=r"Add dataset.options.source.format=FORMAT to the command"):
        data.to_score(str(tmp_path / "new.log")).prepare()


@pytest.mark.parametrize("there", [True, False], ids=["table", "checkpoint"])
def test_columns_without_a_value_are_those_of_training(tmp_path, there):
    old = {"a": [1, 2], "b": ["x", "y"], "n": [0.5, 1], "h": [[1], [2]], "clicked": [0, 1]}
    old |= {"geo": [{"land": "x", "at": 1}, {"land": "y", "at": 2}]}
    old |= {"when": [datetime(2026, 1, 1), datetime(2026, 1, 2)], "zip": ["01", "23"]}
    pq.write_table(pa.table(old), tmp_path / "old.parquet")
    uses = {
        "when": {"as": "id", "by": "hour"},
        "geo.land": {"as": "id", "missing": "y"},
        "geo.at": "id",
        "zip": "id",
        "a": "id",
        "b": {"as": "id", "missing": "x"},
        "n": {"as": "number", "missing": 7},
        "h": {"as": "ids", "missing": 9},
        "clicked": "label",
    }
    path = tmp_path / "new.parquet"
    nothing = {name: pa.nulls(2) for name in ("a", "b", "n", "h", "when")}
    geo = pa.array([{"land": None, "at": 3}] * 2)
    pq.write_table(pa.table({**nothing, "zip": ["10", "23"], "geo": geo}), path)
    trained = table(tmp_path / "old.parquet", columns=uses)
    if not there:
        schema, kinds = trained.schema(), trained.kinds()
        (tmp_path / "old.parquet").unlink()
        trained = table(tmp_path / "old.parquet", columns=uses)
        trained.trained_schema, trained.trained_kinds = schema, kinds
    found = rows_of(trained.to_score(str(path)))
    assert found["a"] == found["when"] == [[], []]
    assert found["zip"][1] == [text_id("23")]
    assert (found["geo_at"], found["geo_land"]) == ([[3]] * 2, [[text_id("y")]] * 2)
    assert found["b"] == [[text_id("x")]] * 2
    assert found["n"] == [7, 7]
    assert found["h"] == [[9], [9]]


@pytest.mark.parametrize("labels", [["a", None], [[1], [2]]])
def test_labels_of_a_table_to_score_are_not_looked_at(path, tmp_path, labels):
    new = clicks(2).drop_columns("clicked").append_column("clicked", [labels])
    pq.write_table(new, tmp_path / "new.parquet")
    assert rows_of(table(path).to_score(str(tmp_path / "new.parquet")))["clicked"] == [0, 0]
