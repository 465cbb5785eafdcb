"""Dataset ``tables.table``: imports keep every row, and give each value as the table has it."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recd_plugin_tables import sources
from recd_plugin_tables.table import Table
from recd_plugin_tables.tests.helpers import COLUMNS, by_row, clicks, rows_of, table, write
from recd_plugin_tables.values import text_id
from recd_plugins.api import object_stores
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import DatasetContract


class TestContract(DatasetContract):
    """Ids that hardly repeat are stored as lists, which the contract knows."""

    @pytest.fixture
    def plugin(self, path):
        return table(path, order="stored", split={"by": "row", "test": 0.2})


def test_every_row_and_value_is_there(path):
    data = table(path)
    data.prepare()
    schema = data.schema()
    assert (schema.sparse, schema.dense) == (("user", "item", "history"), ("price",))
    assert schema.label == "clicked"
    assert data.keys() == {"user_key": "user", "when": "when"}
    names = ["user", "item", "history", "price", "clicked", "_session", "_time", "user_key", "when"]
    assert {tuple(rows.data.schema.names) for rows in data.scan()} == {tuple(names)}
    assert data.left_out() == {}
    left_out = table(path, columns={**COLUMNS, "price": "unused"}).left_out()
    assert left_out == {"price": "has the role 'unused'"}
    found, given = by_row(data), clicks().to_pydict()
    assert found["_row"] == list(range(60))
    assert found["user"] == [[text_id(user)] for user in given["user"]]
    assert found["user_key"] == given["user"]
    assert found["when"] == given["when"]
    assert found["item"] == [[item] for item in given["item"]]
    assert found["history"] == [[text_id(item) for item in items] for items in given["history"]]
    assert found["price"] == [price or 0 for price in given["price"]]
    assert found["clicked"] == given["clicked"]


def test_sessions_stand_together_in_the_order_of_time(path):
    found = rows_of(table(path))
    sessions = found["_session"]
    assert len({*sessions}) == 1 + sum(a != b for a, b in pairwise(sessions))
    for session in set(sessions):
        times = [t for t, s in zip(found["_time"], sessions, strict=True) if s == session]
        assert times == sorted(times)
    assert rows_of(table(path, order="stored"))["_row"] == list(range(60))


@pytest.mark.parametrize(
    ("split", "share"),
    [
        ({"by": "time", "test": 0.25, "validation": 0.25}, (15, 15)),
        ({"by": "time", "test_from": "2023-11-14 22:43:20"}, (30, 30)),
        ({"by": "time", "validation": 0.1, "test_from": "2023-11-14 22:43:20"}, (30, 30)),
        ({"by": "session", "test": 0.3, "validation": 0.3}, (1, 59)),
        ({"by": "row", "test": 0.4}, (10, 40)),
    ],
)
def test_splits(split, share, path):
    data = table(path, split=split)
    found = [rows_of(data, name) for name in data.splits()]
    assert len(found) == 2 + ("validation" in split)
    assert sorted(row for each in found for row in each["_row"]) == list(range(60))
    assert share[0] <= len(found[-1]["_row"]) <= share[1]
    for first, second in pairwise(found):
        if split["by"] == "time":
            assert max(first["_time"]) < min(second["_time"])
        if split["by"] == "session":
            assert not set(first["_session"]) & set(second["_session"])


@pytest.mark.parametrize(
    ("options", "leaks"),
    [
        ({"split": {"by": "time"}}, False),
        ({"split": {"by": "row"}}, True),
        ({"test_path": "earlier.parquet"}, True),
        ({"test_path": "later.parquet", "split": {"validation": 0.1}}, False),
    ],
)
def test_training_rows_later_than_test_rows_are_told(path, capfd, monkeypatch, options, leaks):
    monkeypatch.chdir(path.parent)
    rows = pq.read_table(path)
    times = rows["when"].cast(pa.int64())
    for name, shift in (("earlier", 0), ("later", 10**9)):
        shifted = pc.add(times, shift).cast(rows["when"].type)
        pq.write_table(rows.set_column(1, "when", shifted), f"{name}.parquet")
    data = table(path, **options)
    data.prepare()
    assert data.splits()[-1] == "test"
    told = capfd.readouterr().err
    assert ("training rows are later than test rows" in told) is leaks
    assert "60 rows: 60 for testing" in told or "test_path" not in options


def test_what_a_test_table_lacks_is_told_with_the_option(path, tmp_path):
    later = tmp_path / "later.parquet"
    pq.write_table(clicks().drop_columns("item"), later)
    ((option, what),) = table(path, test_path=later).mistakes()
    assert option == ("columns", "item")
    assert what.startswith(f"{later}: the table has no column 'item'")
    items = [str(item) for item in clicks()["item"].to_pylist()]
    pq.write_table(clicks().set_column(2, "item", [items]), later)
    ((option, what),) = table(path, test_path=later).mistakes()
    assert option == ("columns", "item")
    assert "column 'item' contains text" in what
    assert not (path.parent / "imports").exists()


@pytest.mark.parametrize(
    "place",
    [
        *("s3://a/t.parquet", "file:///etc/passwd", "hf://user/name", "iceberg://catalog/ns.t"),
        *("t.duckdb", "t.lance", "delta", "pipe.csv", "zero.csv", "loop.csv", "nowhere"),
    ],
)
def test_what_recd_validate_asks_opens_local_files_alone(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.csv")
    os.symlink("/dev/zero", "zero.csv")
    os.symlink("loop.csv", "loop.csv")
    os.makedirs("delta/_delta_log")
    os.mkdir("t.lance")
    Path("t.duckdb").touch()

    def opened(*_: object, **__: object) -> None:
        raise AssertionError(f"{place} is opened")

    monkeypatch.setattr(sources, "_LIBRARIES", dict.fromkeys(sources._LIBRARIES, opened))
    local = object_stores.Location.file_system
    monkeypatch.setattr(
        object_stores.Location, "file_system", lambda self: local(self) if self.local else opened()
    )
    options = {"columns": COLUMNS, "path": place}
    assert Table(Table.Options.model_validate(options)).mistakes() == ()


def test_rows_are_named_as_the_table_has_them(tmp_path):
    for name, rows in (("a", clicks().slice(0, 25)), ("b", clicks().slice(25))):
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    data = table(tmp_path, cache=tmp_path.parent / "named", split={"by": "row", "test": 0.3})
    for split in ("train", "test"):
        for rows in data.reader(rank=0, world_size=1, batch_size=8, split=split):
            for row, (item,) in enumerate(rows.data["item"].to_pylist()):
                file, number = ("a", item) if item < 25 else ("b", item - 25)
                place = f"{tmp_path / file}.parquet: row {number} (from 0)"
                assert rows.place_of(row) == place


def test_numbers_that_are_none(path, capfd):
    bare = {**COLUMNS, "price": "number"}
    for on_nan, rows in (("drop", 48), ("zero", 60)):
        data = table(path, columns=bare, on_nan=on_nan)
        found = by_row(data)
        assert len(found["_row"]) == rows
        assert np.isfinite(found["price"]).all()
    scored = table(path, columns=bare, on_nan="drop").to_score(str(path))
    scored.prepare()
    assert "Rows that have a missing value: 12 in 'price'" in capfd.readouterr().err
    assert by_row(scored)["price"] == [price or 0 for price in clicks()["price"].to_pylist()]
    endless = clicks().set_column(4, "price", pa.array([1.0] * 59 + [float("inf")]))
    pq.write_table(endless, path)
    with pytest.raises(DataError, match=r"row 59 \(from 0\), column 'price': the value is inf"):
        table(path).prepare()


def test_dropped_and_empty_values_are_told_apart(path, capfd):
    labels = [None, *clicks()["clicked"].to_pylist()[1:]]
    pq.write_table(clicks().set_column(5, "clicked", [labels]), path)
    table(path, columns=COLUMNS | {"clicked": {"as": "label", "missing": "drop"}}).prepare()
    said = capfd.readouterr().err
    assert "dropped for a missing value: 1 in 'clicked'" in said
    assert said.count("'clicked'") == 1


def test_a_row_without_a_session_is_one_of_its_own(path, capfd):
    users = [None if row % 4 == 0 else f"u{row % 7}" for row in range(60)]
    pq.write_table(clicks().set_column(0, "user", [users]), path)
    data = table(path)
    data.prepare()
    assert "Rows with no ids: 15 in 'user'" in capfd.readouterr().err
    found = by_row(data)
    alone = [session for session, user in zip(found["_session"], users, strict=True) if not user]
    assert len(set(alone)) == 15
    assert len(set(found["_session"])) == 15 + 7
    assert found["user"][0] == []
    dropped = table(path, columns={**COLUMNS, "user": {"as": ["session", "id"], "missing": "drop"}})
    assert len(rows_of(dropped)["_row"]) == 45
    assert len(rows_of(dropped.to_score(str(path)))["_row"]) == 60


def test_labels_of_many_values(path):
    rated = clicks().append_column("rating", [[row % 5 + 1 for row in range(60)]])
    pq.write_table(rated.drop_columns("clicked"), path)
    uses = {name: use for name, use in COLUMNS.items() if name != "clicked"}
    with pytest.raises(DataError, match=r"row 1 .* 'rating': the value is 2. A label must"):
        table(path, columns={**uses, "rating": "label"}).prepare()
    data = table(path, columns={**uses, "rating": {"as": "label", "positive_from": 4}})
    assert by_row(data)["rating"] == [row % 5 + 1 >= 4 for row in range(60)]
    with pytest.raises(DataError, match="every row gets label 0 from column 'rating'"):
        table(path, columns={**uses, "rating": {"as": "label", "positive": [7]}}).prepare()


def test_a_log_of_positives(path):
    data = table(path, columns={**COLUMNS, "clicked": "unused"}, implicit=True)
    assert data.schema().label == "label"
    assert set(rows_of(data)["label"]) == {1.0}


NESTED = pa.table(
    {
        "request": ["a", "b", "c"],
        "history": [[1, 2, 3], [4], []],
        "shown": [
            [{"item": 7, "clicked": 1}, {"item": 8, "clicked": 0}],
            [],
            [{"item": 9, "clicked": 0}, {"item": 7, "clicked": 1}, {"item": 1, "clicked": 0}],
        ],
        "vector": [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]],
    }
)


def test_candidates_become_rows_and_the_rest_stays_with_them(tmp_path, capfd):
    pq.write_table(NESTED, tmp_path / "requests.parquet")
    uses = {"request": "request", "history": "ids", "shown.item": "id", "shown.clicked": "label"}
    uses |= {"vector": "numbers"}
    data = table(tmp_path / "requests.parquet", columns=uses, explode=["shown"])
    data.prepare()
    said = capfd.readouterr().err
    assert "1 rows were dropped because their exploded lists" in said
    assert "Rows with no ids: 3 in 'history'" in said
    assert data.schema().dense == ("vector_0", "vector_1")
    assert list(data.keys().values()) == ["row", "candidate", "request"]
    found = by_row(data)
    assert found["_row"] == [0, 0, 2, 2, 2]
    assert found["_candidate"] == [0, 1, 0, 1, 2]
    assert found["request"] == ["a", "a", "c", "c", "c"]
    assert found["shown_item"] == [[7], [8], [9], [7], [1]]
    assert found["shown_clicked"] == [1, 0, 0, 1, 0]
    assert found["history"] == [[1, 2, 3]] * 2 + [[]] * 3
    assert found["vector_1"] == [1.5] * 2 + [5.5] * 3
    (rows,) = data.scan()
    pairs = zip(rows.data["_row"], rows.data["_candidate"], strict=True)
    for at, (row, number) in enumerate(pairs):
        place = f"{tmp_path / 'requests.parquet'}: row {row} (from 0), candidate {number}"
        assert rows.place_of(at) == place


def test_parallel_lists_of_candidates(tmp_path):
    path = tmp_path / "lists.parquet"
    parallel = pa.table({"user": [1, 2], "items": [["a"], ["b", "c"]], "clicked": [[1], [0, 1]]})
    pq.write_table(parallel, path)
    uses = {"user": ["session", "id"], "items": "id", "clicked": "label"}
    found = by_row(table(path, columns=uses, explode=["items", "clicked"]))
    assert found["items"] == [[text_id("a")], [text_id("b")], [text_id("c")]]
    assert found["clicked"] == [1, 0, 1]
    assert found["user"] == [[1], [2], [2]]
    pq.write_table(parallel.set_column(2, "clicked", [[[1], [0]]]), path)
    said = r"row 1 \(from 0\) has 1 elements in column 'clicked' but 2 in"
    with pytest.raises(DataError, match=said):
        table(path, columns=uses, explode=["items", "clicked"]).prepare()


def test_the_text_of_ids_is_kept_where_it_is_asked_for(path):
    data = table(path, columns={**COLUMNS, "history": {"as": "ids", "texts": True}})
    data.prepare()
    assert data.texts("history") == {text_id(f"h{number}"): f"h{number}" for number in range(7)}
    assert data.texts("user") == {}
    use = {"as": "ids", "texts": True, "missing": "none"}
    data = table(path, columns={**COLUMNS, "history": use})
    data.prepare()
    assert data.texts("history")[text_id("none")] == "none"


BAD: list[Any] = [
    (clicks().slice(0, 0), {}, "the table has no rows"),
    (
        clicks().set_column(1, "when", pa.array([*range(59), None])),
        {},
        r"row 59 .* 'when': .* A column with role 'time' cannot .* to 'drop'\.$",
    ),
    (
        clicks().append_column("vector", [[[1.0]] * 60]),
        {"columns": {**COLUMNS, "vector": "numbers", "item": {"as": "id", "name": "vector_0"}}},
        "columns 'item' and 'vector' would both be imported as 'vector_0'",
    ),
]


@pytest.mark.parametrize(("rows", "options", "message"), BAD)
def test_what_cannot_be_imported_is_told(rows, options, message, tmp_path):
    pq.write_table(rows, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=message):
        table(tmp_path / "t.parquet", **options).prepare()


def test_a_split_by_row_keeps_requests_whole(tmp_path):
    rows, requests = np.arange(600), np.repeat(np.arange(200) % 100, 3)
    place = write(tmp_path / "t.parquet", {"req": requests, "item": rows, "y": rows % 2})
    columns = {"req": {"as": "request"}, "item": {"as": "id"}, "y": {"as": "label"}}
    data = table(place, columns=columns, split={"by": "row", "test": 0.3})
    train, test = rows_of(data, "train"), rows_of(data, "test")
    assert sorted(train["_row"] + test["_row"]) == list(range(600))
    assert not set(train["_request"]) & set(test["_request"])
    assert 60 <= len(test["_row"]) <= 300


def test_an_import_is_used_again_until_table_or_options_change(path, capfd):
    def imports() -> int:
        return len(list((path.parent / "imports").iterdir()))

    table(path).prepare()
    assert "60 rows: 60 for training" in capfd.readouterr().err
    table(path, prefetch=0).prepare()
    assert capfd.readouterr().err == ""
    assert imports() == 1
    table(path, order="stored").prepare()
    assert imports() == 2
    first = table(path)
    first.prepare()
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))
    again = table(path)
    again.prepare()
    assert imports() == 3
    assert again.identity() == first.identity(), "the rows are what they were"
    pq.write_table(clicks(61), path)
    other = table(path)
    other.prepare()
    assert other.identity() != first.identity()


def test_a_broken_import_leaves_nothing(path):
    with pytest.raises(DataError, match=r"clicks.parquet: row 0 \(from 0\), column 'price'"):
        table(path, columns={**COLUMNS, "price": "number"}).prepare()
    assert not list((path.parent / "imports").iterdir())


def test_a_test_table_replaces_the_split(path):
    data = table(path, test_path=path, split={"by": "time", "test": 0.25})
    assert [len(rows_of(data, split)["_row"]) for split in ("train", "test")] == [60, 60]


def test_a_sample_request_shares_the_columns_of_a_session(tmp_path):
    rows = clicks().append_column("tier", pa.array([row % 7 for row in range(60)]))
    pq.write_table(rows, path := tmp_path / "tiers.parquet")
    shared, own = table(path, columns={**COLUMNS, "tier": "number"}).sample_request()
    assert (set(shared), set(own)) == ({"user", "history", "tier"}, {"item", "price"})
