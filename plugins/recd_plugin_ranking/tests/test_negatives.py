"""Wrapper ``ranking.negatives``: what is drawn goes by the row and the epoch alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_ranking.negatives import Negatives
from recd_plugin_ranking.tests.click_cases import clicks, with_column
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.interfaces import Reader
from recd_plugins.runtime.errors import DataError, RecdError
from recd_plugins.testing.contracts import DatasetContract


def wrapped(path: Path, **options: Any) -> Negatives:
    inner = SessionParquet(SessionParquet.Options(path=path))
    plugin = Negatives(Negatives.Options.model_validate({"item": "item", **options}))
    made = plugin.over(inner, None)  # type: ignore[arg-type] # it asks no lookups
    made.prepare()
    return made


def read(dataset: Negatives, batch_size: int = 15, epochs: int = 1) -> list[list[dict[str, Any]]]:
    reader = dataset.reader(rank=0, world_size=1, batch_size=batch_size, split="train")
    return [[row for rows in reader for row in rows.data.to_pylist()] for _ in range(epochs)]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return clicks(tmp_path_factory.mktemp("clicks") / "clicks.parquet")


class TestUniform(DatasetContract):
    batch_size = 10

    @pytest.fixture
    def plugin(self, path):
        return wrapped(path, negatives=1, with_item=["colour", "price"], never=["history"])


class TestInRequest(DatasetContract):
    @pytest.fixture
    def plugin(self, tmp_path):
        log = clicks(tmp_path / "log.parquet", clicked=False, rows=120)
        return wrapped(log, negatives=1, by="in_request")


def test_items_are_replaced_with_their_features_and_nothing_else(path):
    options = {"with_item": ["colour", "price"], "never": ["history"]}
    (rows,) = read(wrapped(path, **options))
    assert len(rows) == 75 * 5
    for start in range(0, len(rows), 5):
        own, *drawn = rows[start : start + 5]
        assert own["label"] == 1
        for each in drawn:
            (item,) = each["item"]
            assert each["label"] == 0
            assert item not in (*own["item"], *own["history"])
            assert each["colour"] == [item % 5, 7]
            assert each["price"] == item / 4
            assert each["history"] == own["history"]


def test_popular_items_are_drawn_more_often(path):
    counts = Counter(row["item"][0] for row in read(wrapped(path))[0] if row["label"])
    shares = {}
    for by in ("uniform", "popularity"):
        epochs = read(wrapped(path, by=by, negatives=4), batch_size=375, epochs=20)
        drawn = Counter(row["item"][0] for rows in epochs for row in rows if not row["label"])
        shares[by] = [drawn[item] / drawn.total() for item in sorted(counts)]
    assert np.ptp(shares["uniform"]) < 0.05
    # Its own item is never drawn, so that of the most popular ones a little less than their share.
    expected = np.array([counts[item] / 75 for item in sorted(counts)])
    assert np.abs(shares["popularity"] - expected).max() < 0.05
    assert np.corrcoef(shares["popularity"], expected)[0, 1] > 0.95


def test_each_epoch_draws_anew_and_each_seed(path):
    first, second = read(wrapped(path), epochs=2)
    assert first != second
    assert [row for row in first if row["label"]] == [row for row in second if row["label"]]
    assert read(wrapped(path, seed=1))[0] != first
    assert read(wrapped(path), batch_size=5)[0] == first


def test_partitions_draw_apart_though_their_files_have_one_name(tmp_path):
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        clicks(tmp_path / day / "part-0.parquet")
    (rows,) = read(wrapped(tmp_path))
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert first != second
    assert [read(wrapped(tmp_path / day))[0] for day in ("day=1", "day=2")] == [first, second]


def test_a_request_is_compared_with_what_it_showed(tmp_path):
    path = clicks(tmp_path / "log.parquet", clicked=False)
    (rows,) = read(wrapped(path, by="in_request", negatives=2), batch_size=15)
    log = pq.read_table(path).to_pylist()
    shown = {(row["item"][0], row["history"][0]) for row in log if not row["label"]}
    for start in range(0, len(rows), 3):
        own, *others = rows[start : start + 3]
        assert [own["label"], *(row["label"] for row in others)] == [1, 0, 0]
        assert all(row["history"] == own["history"] for row in others)
        assert all((row["item"][0], row["history"][0]) in shown for row in others)
        same = [r["price"] for r in log if not r["label"] and r["history"] == own["history"]]
        pairs = [sorted(same[i : i + 2]) for i in range(0, len(same), 2)]
        assert sorted(r["price"] for r in others) in pairs


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 8, "batch of 8 rows is not a multiple of 5.*such as 5"),
        ({"item": "history"}, 15, r"row 0 \(from 0\): item feature 'history' has 2 ids"),
        ({}, 15, r"log.parquet: row 1 \(from 0\): the label is 0.*in_request"),
        ({"with_item": ["colours"]}, 15, r"no feature 'colours'. Use one of: 'colour', 'history"),
    ],
)
def test_refuses(tmp_path, options, size, message):
    log = clicks(tmp_path / "log.parquet", clicked=False)
    with pytest.raises(RecdError, match=message):
        read(wrapped(log, **options), size)


def test_in_request_refuses(path, tmp_path):
    with pytest.raises(
        DataError, match="no request or session has both a positive and a negative row"
    ):
        read(wrapped(path, by="in_request"))
    log = clicks(tmp_path / "log.parquet", clicked=False, rows=9)
    for sessions in ([0, 0, 0, 1, 1, None, 2, None, 2], [0.0] * 5 + [np.nan] * 4):
        with pytest.raises(DataError, match=r"log.parquet: row 5 \(from 0\): column 'session_id'"):
            read(wrapped(with_column(log, "session_id", pa.array(sessions)), by="in_request"))


def test_a_row_that_knows_every_item_is_named(tmp_path):
    keys = {"session_id": [0, 1], "ts": [0, 1], "label": [1, 1]}
    table = pa.table({**keys, "item": [[1], [2]], "history": [[], [1, 2]]})
    pq.write_table(table, tmp_path / "few.parquet")
    with pytest.raises(DataError, match=r"row 1 \(from 0\): all 2 items"):
        read(wrapped(tmp_path / "few.parquet", never=["history"], negatives=1), 2)
    # One item is left: it is found, however unlikely.
    (rows,) = read(wrapped(tmp_path / "few.parquet", negatives=3), 4)
    assert [row["item"] for row in rows] == [[1], [2], [2], [2], [2], [1], [1], [1]]


def test_in_request_tells_sessions_of_any_type_apart(tmp_path):
    options = {"by": "in_request", "negatives": 2}
    path = clicks(tmp_path / "log.parquet", clicked=False)
    expected = read(wrapped(path, **options))
    numbers = range(75)
    for names in (
        pa.array([2**53 + row // 3 for row in numbers]),
        pa.array([f"user {row // 3}" for row in numbers]),
        pa.array([b"\xff%d" % (row // 3) for row in numbers]),
    ):
        for sessions in (names, names.dictionary_encode()):
            assert read(wrapped(with_column(path, "session_id", sessions), **options)) == expected


def test_in_request_remembers_whose_rows_it_read(tmp_path):
    def reader(name: str, prices: float) -> Reader:
        path = clicks(tmp_path / name, clicked=False)
        with_column(path, "price", pa.array(np.full(75, prices, np.float32)))
        dataset = wrapped(path, by="in_request")
        return dataset.reader(rank=0, world_size=1, batch_size=15, split="train")

    state = reader("log.parquet", 1).state_dict()
    reader("log.parquet", 1).load_state_dict(state)
    before = {name: value for name, value in state["inner"]["data"].items() if name != "log"}
    assert before != state["inner"]["data"]
    earlier = {**state, "inner": {**state["inner"], "data": before}}  # of an earlier version
    reader("log.parquet", 1).load_state_dict(earlier)
    with pytest.raises(DataError, match=r"other data than positive rows.*: 'log' was"):
        reader("log.parquet", 2).load_state_dict(state)


@pytest.mark.parametrize(("kind", "by"), [(pa.bool_(), "in_request"), (pa.float32(), "uniform")])
def test_a_row_without_a_label_is_refused(tmp_path, kind, by):
    path = clicks(tmp_path / "log.parquet", rows=9)
    with_column(path, "label", pa.array([1] * 4 + [None] + [1] * 4).cast(kind))
    with pytest.raises(DataError, match=r"log.parquet: row 4 \(from 0\): label 'label' is missing"):
        read(wrapped(path, by=by), 5)
