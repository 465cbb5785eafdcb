"""Ids that a vocabulary has no number for are told by `recd predict` and `recd evaluate`."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from tests import forked

ROWS = 400


def recd(*arguments: object) -> str:
    return forked.run([forked.RECD, *map(str, arguments)], check=True).stderr


@pytest.mark.slow
def test_unknown_ids_are_counted_and_fields_of_structs_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = range(ROWS)
    table = pa.table(
        {
            "user": [f"u{row % 20}" for row in rows],
            "item": [row * 7 % 30 for row in rows],
            "geo": [{"lat": float(row), "of": {"land": "x"}} for row in rows],
            "click": [row % 3 // 2 for row in rows],
        }
    )
    pq.write_table(table, "clicks.parquet")
    recd("init", "clicks.parquet", "my.yaml", "--unused", "geo.lat")
    recd("run", "my.yaml", "training.ranks=2")
    new = table.set_column(0, "user", [[f"u{row % 25}" for row in rows]]).drop_columns("click")
    pq.write_table(new, "new.parquet")
    keep = ["--keep", "geo.lat", "--keep", "geo.of.land"]
    said = recd(
        "predict", "my.yaml", "new.parquet", "-o", "s.csv", "--ranks", 2, "--batch-size", 999, *keep
    )
    assert "ids that training has not numbered, scored as unknown ones: user 5\n" in said
    scores = pyarrow.csv.read_csv("s.csv")
    assert scores["geo.lat"].to_pylist() == list(rows)
    assert set(scores["geo.of.land"].to_pylist()) == {"x"}
    assert "has not numbered" not in recd("evaluate", "my.yaml")
