"""``recd analyze`` and ``recd cluster`` read all formats of ``recd init``, and registry files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from tests.commands import invoke, recd, refusal

ROWS = 600
RANDOM = np.random.default_rng(0)
SESSIONS = RANDOM.integers(0, 40, ROWS)
COLUMNS = {
    "session_id": SESSIONS,
    "ts": 1_700_000_000 + np.arange(ROWS),
    "item_id": RANDOM.integers(0, 90, ROWS),
    "click": RANDOM.integers(0, 2, ROWS),
}
RECENT = [[int(session) * 10 + n for n in range(6)] for session in SESSIONS]


pytestmark = pytest.mark.usefixtures("cwd")


def analyzed(*words: str) -> dict[str, Any]:
    result = invoke("analyze", *words, "--json", "-")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report | {"features": {each["name"]: each for each in report["features"]}}


def write_json(path: str) -> None:
    rows = pa.table({**COLUMNS, "recent": RECENT}).to_pylist()
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_other_formats_are_analyzed_like_parquet() -> None:
    table = pa.table({**COLUMNS, "recent": RECENT})
    pq.write_table(table, "t.parquet")
    expected = analyzed("t.parquet")
    assert list(expected["features"]) == ["recent"]
    write_json("t.jsonl")
    pa.feather.write_feather(table, "t.arrow")
    for name in ("t.jsonl", "t.arrow"):
        found = analyzed(name)
        assert found["path"] == name
        assert found["rows"] == ROWS
        assert found["sessions"] == expected["sessions"] | {"torn": 0.0}  # sorted by the import
        assert {"recent", "item_id"} <= set(found["features"])
        for figure in ("length", "stays", "exact", "partial"):
            assert found["features"]["recent"][figure] == expected["features"]["recent"][figure]


def test_tables_without_lists_are_imported() -> None:
    table = pa.table(COLUMNS)
    pq.write_table(table.rename_columns(["visitor", "ts", "item_id", "click"]), "ids.parquet")
    pa.csv.write_csv(table, "t.csv")
    by_name = analyzed("ids.parquet", "--session", "visitor", "--timestamp", "ts")
    assert by_name["sessions"] == analyzed("t.csv")["sessions"]
    assert by_name["sessions"]["count"] == len(set(SESSIONS))
    said = recd("analyze", "t.csv")
    assert "t.csv: imported with the column roles that recd init guesses, and sorted" in said


def test_cluster_writes_all_rows_of_other_formats_and_the_training_rows_of_a_registry() -> None:
    write_json("t.jsonl")
    recd("cluster", "t.jsonl", "sorted")
    found = pq.read_table("sorted")
    assert found.num_rows == ROWS
    keys = list(zip(found["_session"].to_pylist(), found["_time"].to_pylist(), strict=True))
    neighbours = list(pairwise(keys))
    assert all(time <= later for (one, time), (two, later) in neighbours if one == two)
    assert sum(one != two for (one, _), (two, _) in neighbours) == len(set(SESSIONS)) - 1
    items = sorted(item for (item,) in found["item_id"].to_pylist())
    assert items == sorted(COLUMNS["item_id"].tolist())
    assert "must not be the same as SRC" in refusal("cluster", "t.jsonl", "t.jsonl/out")
    recd("init", "t.jsonl", "my.yaml", "--test", "0.25")
    recd("cluster", "my.yaml", "train")
    num_train = pq.read_table("train").num_rows
    assert 0.7 * ROWS < num_train < 0.8 * ROWS
    assert analyzed("my.yaml")["rows"] == num_train


def test_columns_without_a_role_can_be_given() -> None:
    two_flags = pa.table({**COLUMNS, "won": 1 - COLUMNS["click"]})
    pa.csv.write_csv(two_flags.rename_columns([*[*COLUMNS][:3], "flag", "won"]), "t.csv")
    assert "Set --label COLUMN." in refusal("analyze", "t.csv")
    expected = analyzed("t.csv", "--label", "flag")["sessions"]
    assert expected["count"] == len(set(SESSIONS))
    areas = pa.table(COLUMNS).rename_columns(["area", "ts", "item_id", "click"])
    pa.csv.write_csv(areas, "ids.csv")
    recd("init", "ids.csv", "ids.yaml", "--test", "0")
    assert analyzed("ids.yaml", "--session", "area")["sessions"] == expected


def test_tables_that_cannot_be_used_are_told() -> None:
    table = pa.table(COLUMNS).drop_columns("session_id")
    pa.csv.write_csv(table, "ids.csv")
    for command in (["analyze", "ids.csv"], ["cluster", "ids.csv", "out"]):
        said = refusal(*command)
        assert "ids.csv: no column identifies users or sessions. Set one with --session" in said
    recd("init", "ids.csv", "ids.yaml")
    assert "Pass the column of users or visits with --session" in refusal("analyze", "ids.yaml")
    assert "no column 'item'. Did you mean" in refusal("analyze", "ids.yaml", "--session", "item")
    said = refusal("analyze", "ids.yaml", "--session", "click")
    assert "ids.yaml: role 'label' cannot be combined" in said
    pa.csv.write_csv(pa.table(COLUMNS).drop_columns("click"), "log.csv")
    assert "label column cannot be guessed. Set --label COLUMN." in refusal("analyze", "log.csv")
    Path("t.dat").write_text("1\t2\n3\t4\n")
    assert "--format) to one of: 'parquet', 'csv'" in refusal("analyze", "t.dat")
    assert "no column 'nope'" in refusal("cluster", "ids.csv", "out", "--session", "nope")
    assert "s3://b/t.csv: this command reads URLs only" in refusal("analyze", "s3://b/t.csv")
    assert not Path("out").exists()
