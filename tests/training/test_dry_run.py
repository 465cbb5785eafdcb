"""What a run would do up to its first step."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tests.commands import invoke
from tests.small_registry import hashed, write_registry

from recd_plugins import load_registry
from recd_plugins.training.dry_run import unused_line


def write(folder: Path) -> Path:
    rows = range(20)
    columns = {
        "session_id": rows,
        "ts": rows,
        "user": rows,
        "clicks": [[row] for row in rows],
        "price": [float(row) for row in rows],
        "label": [row % 2 for row in rows],
        "city": ["a"] * 20,
        "shop": rows,
        "age": [1.5] * 20,
    }
    table = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table, folder / "t.parquet")
    path, checkpoints = f"{folder}/t.parquet", {"path": f"{folder}/checkpoints"}
    options = {"path": path, "sparse": ["user", "clicks"], "dense": ["price"]}
    return write_registry(
        folder,
        dataset={"use": "recd.session_parquet", "options": options},
        preprocessing=hashed(50),
        pooling=[{"use": "recd.attention", "features": ["clicks"]}],
        model={"num_embeddings": 50},
        training={"batch_size": 4, "ranks": 2, "epochs": 3, "checkpoint": checkpoints},
    )


def test_what_each_column_is_for(tmp_path: Path) -> None:
    registry = write(tmp_path)
    figures = tmp_path / "figures.json"
    done = invoke("run", registry, "--dry-run", "--json", figures, "training.steps=5")
    assert done.exit_code == 0, done.output
    report = json.loads(figures.read_text())
    assert {each["name"]: (each["feeds"], each["how"]) for each in report["columns"]} == {
        "user": ("sparse", "recd.sigrid_hash, 50 rows of 4, pooled in bags"),
        "clicks": ("sparse", "recd.sigrid_hash, 50 rows of 4, recd.attention"),
        "price": ("dense", ""),
        "label": ("label", ""),
        "session_id": ("sessions", "not a model input"),
        "ts": ("order of a session", "not a model input"),
        "city": (None, "string: the type is not supported"),
        "shop": (None, "int64: not in the option 'sparse'"),
        "age": (None, "double: not in the option 'dense'"),
    }
    assert unused_line(load_registry(registry)).startswith(
        "columns that the run does not use: city (string: the type is not supported), shop ("
    )
    assert report["rows"] == {"train": 16}
    assert report["steps"] == 5
    assert report["table_bytes"] == 2 * 50 * 4 * 4
    assert report["plan"]
    assert "data columns" in done.stdout
    assert "memory of a rank: " in done.stdout
    assert len(done.stdout.splitlines()) <= 30
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["figures.json", "registry.yaml", "t.parquet"]
