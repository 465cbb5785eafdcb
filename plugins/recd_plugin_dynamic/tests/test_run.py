"""Dynamic tables from ``recd init`` to reports, scores and embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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


def test_a_table_of_strings_becomes_a_model(cwd: Path) -> None:
    log(cwd / "clicks.parquet")
    said = refusal("init", "clicks.parquet", "my.yaml", "--dynamic", "--implicit", code=2)
    assert "--dynamic needs a label" in said
    recd("init", "clicks.parquet", "my.yaml", "--dynamic")
    text = (cwd / "my.yaml").read_text()
    assert "{use: dynamic.table, tables: [t_user, t_item]}" in text
    assert "features: [country], options: {rows: " in text
    assert "features: [user]" not in text
    recd("validate", "my.yaml")
    small = ["model.tables.t_item.num_embeddings=512", "training.checkpoint.every=100"]
    logged = "callbacks=[{use: dynamic.eviction_log, options: {folder: evicted}}]"
    shown = recd("run", "my.yaml", *small, logged, "--json", "run.json")
    assert "dynamic tables" in shown
    report = json.loads(Path("run.json").read_text())["dynamic_tables"]["t_item"]
    evicted = [pq.read_table(each) for each in sorted(Path("evicted").iterdir())]
    assert len(evicted) == 2  # one file per checkpoint
    ids = pa.concat_tables(evicted)
    assert set(ids["table"].to_pylist()) == {"t_item"}
    assert len(ids) == report["evicted"] == report["inserted"] - report["ids"] > 0
    recd("evaluate", "my.yaml", *small)
    recd("predict", "my.yaml", "clicks.parquet", "-o", "scores.parquet", *small)
    recd("embeddings", "my.yaml", "item", "-o", "items.parquet", *small)
    items = pq.read_table("items.parquet")
    trained = pq.read_table("clicks.parquet")["item"].slice(0, ROWS * 8 // 10).to_pylist()
    assert len(items) == report["ids"] <= report["capacity"] == 448
    assert set(items["value"].to_pylist()) <= set(trained)
    said = refusal("run", "my.yaml", "--compare", *small)
    assert "a sharding plugin for raw ids, which the baseline of --compare does not use" in said


def test_rows_in_files_train_as_rows_in_memory(cwd: Path) -> None:
    log(cwd / "clicks.parquet")
    recd("init", "clicks.parquet", "my.yaml", "--dynamic")
    small = ["model.tables.t_item.num_embeddings=512", "training.checkpoint.path=null"]
    options = "{policy: lru, share: 0.1, storage: {file: store}}"
    cache = f"cache=[{{use: scars.cache, tables: [t_item], options: {options}}}]"
    losses = []
    for more in ([], [cache]):
        recd("run", "my.yaml", "training.steps=40", *small, *more, "--json", "run.json")
        report = json.loads(Path("run.json").read_text())
        losses.append(report["losses"])
        assert report["dynamic_tables"]["t_item"]["evicted"] > 0
        assert ("caches" in report) == bool(more)
    assert losses[0] == losses[1]
