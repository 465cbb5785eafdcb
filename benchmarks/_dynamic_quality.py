"""Log loss of dynamic tables, compared to ids hashed into tables of equally many rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._measure import Figure, Findings, Size, lower
from recd_plugin_dynamic.index.mix import mix
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

# Rows of the drifting stream, and runs with different seeds.
_SIZES: dict[Size, tuple[int, int]] = {
    "tiny": (4_000, 1),
    "small": (100_000, 3),
    "reference": (400_000, 5),
}
# Items that appear in each window of rows, and the number of windows until they are gone.
_WINDOW, _NEW_ITEMS, _LIFETIME, _USERS = 2_000, 200, 8, 500
_BUCKETS = 16

_REGISTRY = """
version: 1
dataset:
  use: tables.table
  options: {{path: {path}, order: stored, split: {{by: time, test: 0.1}}, cache: {folder}/imports,
    columns: {columns}}}
converter: {{use: recd.kjt}}
{ids}
model: {{embedding_dim: 16, num_embeddings: 100, tables: {tables}, bottom_mlp: [16], top_mlp: [64]}}
training: {{batch_size: 128, seed: {seed}, optimizer: rowwise_adagrad, learning_rate: 0.05,
  dense_learning_rate: 0.01, eps: 1.0e-6}}
"""


def log_losses(size: Size, movielens: Path | None) -> Findings:
    """Return the test log loss of both kinds of tables on a drifting stream and on MovieLens.

    At each time, the stream has half as many items as its table has rows, and in all several times
    as many. MovieLens has 943 users for 512 rows, and 1,682 items for 1,024 rows.

    Args:
        size: number of rows of the stream, and of seeds.
        movielens: file ``ml-100k.inter``; None omits MovieLens.
    """
    rows, seeds = _SIZES[size]
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder, "stream.parquet")
        pq.write_table(drifting_stream(rows), stream)
        columns = {"user": "id", "item": "id", "ts": {"as": "time", "unit": "s"}, "click": "label"}
        tables = {"user": 1_024, "item": 2 * _NEW_ITEMS * _LIFETIME}
        figures += _figures("", stream, columns, tables, seeds)
        if movielens is not None:
            ratings = Path(folder, "ratings.parquet")
            names = ["user", "item", "rating", "ts"]
            read = np.loadtxt(movielens, skiprows=1, dtype=np.int64).T
            rated = pa.table(dict(zip(names, read, strict=True))).sort_by("ts")
            pq.write_table(rated, ratings)
            del columns["click"]
            columns["rating"] = {"as": "label", "positive_from": 4}
            tables = {"user": 512, "item": 1_024}
            figures += _figures("movielens_", ratings, columns, tables, seeds)
    return Findings(f"a drifting stream of {rows:,} rows, {seeds} seed(s)", figures)


def drifting_stream(rows: int) -> pa.Table:
    """Return clicks on items that appear in a window of rows and disappear some windows later.

    The logit of a click is the sum of an item's quality, a user's bias and noise.
    """
    draw = np.random.default_rng(0)
    window = np.arange(rows) // _WINDOW
    age = np.minimum(draw.geometric(2 / _LIFETIME, rows) - 1, _LIFETIME - 1)
    number = (window - age + _LIFETIME) * _NEW_ITEMS + draw.integers(0, _NEW_ITEMS, rows)
    user = draw.integers(0, _USERS, rows)
    quality, bias = draw.normal(0, 1.5, number.max() + 1), draw.normal(0, 0.5, _USERS)
    logits = quality[number] + bias[user]
    return pa.table(
        {
            "user": mix(user),
            "item": mix(number),
            "ts": 1_700_000_000 + np.arange(rows),
            "click": (draw.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64),
        }
    )


def _figures(
    prefix: str, path: Path, columns: Mapping[str, object], tables: Mapping[str, int], seeds: int
) -> list[Figure]:
    names = [f"t_{name}" for name in tables]
    dynamic = {"use": "dynamic.table", "tables": names, "options": {"buckets": _BUCKETS}}
    hashed = [
        {"use": "recd.sigrid_hash", "features": [name], "options": {"buckets": rows}}
        for name, rows in tables.items()
    ]
    ids = {
        "dynamic": f"sharding: {json.dumps([dynamic])}",
        "hashed": f"preprocessing: {json.dumps(hashed)}",
    }
    sizes = {f"t_{name}": {"num_embeddings": rows} for name, rows in tables.items()}
    losses: dict[str, list[float]] = {kind: [] for kind in ids}
    for seed in range(seeds):
        for kind, section in ids.items():
            registry = path.with_name(f"{prefix}{kind}{seed}.yaml")
            registry.write_text(
                _REGISTRY.format(
                    path=path,
                    folder=path.parent,
                    columns=json.dumps(columns),
                    ids=section,
                    tables=json.dumps(sizes),
                    seed=seed,
                )
            )
            with session(Job(registry)) as trainer:
                losses[kind].append(trainer.train().as_json()["test"]["log_loss"])
    return [lower(f"{prefix}log_loss_{kind}", found, "nats") for kind, found in losses.items()]
