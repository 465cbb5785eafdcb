"""Training on a table in a store: the same losses as from disk, with a worker and a filter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.data.storage.counted_store import Store

from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job, train


def registry(path: Path, table: str, workers: int, storage: dict[str, str]) -> Path:
    options: dict[str, Any] = {
        "path": table,
        "dense": ["price"],
        "where": [["hour", ">=", 1], ["price", "<", 200]],
        "storage": storage,
    }
    document = {
        "version": 1,
        "dataset": {"use": "recd.session_parquet", "options": options},
        "converter": {"use": "recd.ikjt", "options": {"groups": [["seen", "liked"]]}},
        "preprocessing": [
            {"use": "recd.sigrid_hash", "features": ["seen", "liked"], "options": {"buckets": 100}}
        ],
        "model": {"embedding_dim": 8},
        "training": {"batch_size": 16, "ranks": 2, "epochs": 2, "workers": workers},
    }
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(document, file)
    return path


def train_each(
    rank: int, world_size: int, jobs: list[Job], environment: dict[str, str]
) -> list[Result]:
    """Ranks may have been started by another test, in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return [train(rank, world_size, job) for job in jobs]


def test_it_trains_from_s3_as_from_disk(folder: Path, store: Store, tmp_path: Path) -> None:
    endpoint = {"endpoint": store.endpoint, "region": "us-east-1"}
    jobs = [
        Job(registry(tmp_path / "disk.yaml", str(folder), 0, {})),
        Job(registry(tmp_path / "s3.yaml", "s3://tables/clicks", 1, endpoint)),
    ]
    named = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "XDG_CACHE_HOME")
    environment = {name: os.environ[name] for name in named}
    disk, s3 = run_on_ranks(train_each, 2, jobs, environment)[0]
    assert disk.losses == s3.losses
    assert len(disk.losses) == 2 * (175 // 32)
