"""Runs with user layers once per request, under each way to shard or cache tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.small_registry import write_registry

from recd_plugins.model import user_split
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job, train

BATCH, STEPS = 16, 4
#: Where each request has five rows, most batches start and end within a request.
CANDIDATES = 5
TIERED = {"budget": "3x", "minimise": "bytes", "memory_multiplier": 1}


def entry(section: str, use: str, tables: list[str], **options: Any) -> dict[str, Any]:
    return {section: [{"use": use, "tables": tables, "options": options}]}


VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {},
    **{
        use: entry("sharding", f"torchrec.{use}", ["t_*"])
        for use in ("table_wise", "row_wise", "column_wise")
    },
    "coalesced": entry("sharding", "torchrec.row_wise", ["t_*"], coalesce=True),
    **{
        use: entry("sharding", f"flexshard.{use}", ["t_history"], **TIERED)
        for use in ("two_tier", "three_tier")
    },
    "cache": entry(
        "cache", "scars.cache", ["t_history", "t_item", "t_user"], policy="lru", share=0.4
    ),
    "partial": {
        "converter": {
            "use": "recd.partial_ikjt",
            "options": {"features": ["history"], "groups": [["user", "country"]]},
        }
    },
}


def write_table(path: Path, num_rows: int) -> None:
    draw = np.random.default_rng(0)
    request = np.arange(num_rows) // CANDIDATES
    num = int(request[-1]) + 1
    history = [draw.integers(0, 50, n).tolist() for n in draw.integers(0, 6, num)]
    ids = pa.list_(pa.int64())
    columns = {
        "session_id": request,
        "ts": np.arange(num_rows, dtype=np.float64),
        "label": draw.integers(0, 2, num_rows).astype(np.int8),
        "age": draw.random(num, dtype=np.float32)[request],
        "price": draw.random(num_rows, dtype=np.float32),
        "user": pa.array(draw.integers(0, 50, (num, 1))[request].tolist(), ids),
        "country": pa.array(draw.integers(0, 50, (num, 1))[request].tolist(), ids),
        "history": pa.array([history[n] for n in request], ids),
        "item": pa.array(draw.integers(0, 50, (num_rows, 1)).tolist(), ids),
    }
    pq.write_table(pa.table(columns), path, row_group_size=64)


def train_each(rank: int, world_size: int, jobs: list[Job]) -> list[tuple[list[float], int]]:
    """Return losses, and the number of steps whose user layers ran once per request."""
    found = []
    for job in jobs:
        logits = user_split.UserSplit.logits
        with (
            patch.dict(user_split._MIN_SAVED, cpu=1),
            patch.object(user_split.UserSplit, "logits", autospec=True, side_effect=logits) as used,
        ):
            found.append((train(rank, world_size, job).losses, used.call_count))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_are_those_of_layers_per_row(tmp_path: Path, world_size: int) -> None:
    write_table(tmp_path / "table.parquet", BATCH * STEPS * world_size)
    names = [name for name in VARIANTS if name != "three_tier" or world_size == 4]  # several nodes
    table = {"path": str(tmp_path / "table.parquet")}
    usual = {
        "dataset": {"use": "recd.session_parquet", "options": table},
        "converter": {"use": "recd.ikjt"},
        "pooling": [{"use": "recd.mean", "features": ["history"]}],
        "training": {
            "batch_size": BATCH,
            "ranks": world_size,
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "evaluate": False,
        },
    }
    jobs = []
    for name in names:
        sections = {**usual, **VARIANTS[name]}
        user_rows = "all" if name == "stock" else "unique"
        sections["model"] = {"embedding_dim": 8, "num_embeddings": 50, "user_rows": user_rows}
        path = write_registry(tmp_path, f"{name}.yaml", **sections)
        jobs.append(Job(path, "baseline" if name == "stock" else "plugins"))
    found = run_on_ranks(train_each, world_size, jobs, local_world_size=2)[0]
    (stock, used), *others = found
    assert used == 0
    assert len(stock) == STEPS
    for name, (losses, used) in zip(names[1:], others, strict=True):
        assert used == STEPS, name
        assert losses == pytest.approx(stock, abs=1e-6), name
