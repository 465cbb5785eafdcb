"""Dynamic tables from ``recd init`` to reports, scores and embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import recd, refusal

ROWS, NAMES = 4_000, 400


def log(path: Path) -> Path:
    """Write clicks on items with string ids. Later rows have other items."""
    draw = np.random.default_rng(3)
    items = draw.integers(0, NAMES, ROWS) + np.arange(ROWS) // 8
    columns = {
        "user": [f"user {each}" for each in draw.integers(0, NAMES, ROWS)],
        "item": [f"item {each}" for each in items],
        "country": [f"c{each}" for each in draw.integers(0, 9, ROWS)],
        "ts": 1_700_000_000 + 60 * np.arange(ROWS),
        "click": (draw.random(ROWS) < 0.2 + 0.6 * (items % 2)).astype(np.int64),
    }
    pq.write_table(pa.table(columns), path)
    return path


def test_a_table_of_strings_becomes_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log(tmp_path / "clicks.parquet")
    said = refusal("init", "clicks.parquet", "my.yaml", "--dynamic", "--implicit", code=2)
    assert "--dynamic needs a label" in said
    recd("init", "clicks.parquet", "my.yaml", "--dynamic")
    text = (tmp_path / "my.yaml").read_text()
    assert "{use: dynamic.table, tables: [t_user, t_item]}" in text
    assert "features: [country], options: {rows: " in text
    assert "features: [user]" not in text
    recd("validate", "my.yaml")
    recd("run", "my.yaml")
    recd("evaluate", "my.yaml")
    recd("predict", "my.yaml", "clicks.parquet", "-o", "scores.parquet")
    recd("embeddings", "my.yaml", "item", "-o", "items.parquet")
    items = pq.read_table("items.parquet")
    trained = pq.read_table("clicks.parquet")["item"].slice(0, ROWS * 8 // 10).to_pylist()
    assert sorted(items["value"].to_pylist()) == sorted(set(trained))
