"""Hot batches in training: the backing store rests, all sides and workers see the same batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML

from recd_plugin_scars.runtime.kernel import cache_traffic
from recd_plugin_scars.runtime.stores import RowMover
from recd_plugin_scars.tests.cache_cases import train_each, write_registry
from recd_plugins import load_registry
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.result import Result
from recd_plugins.training.sharded_model import build_sharded_model
from recd_plugins.training.trainer import Job

#: Calls of the mover and bytes that moved in a step.
Step = tuple[int, int]


def count_moves(rank: int, world_size: int, path: Path) -> list[Step]:
    registry = load_registry(path)
    parts = build_sharded_model(registry, "plugins", torch.device("cpu"))
    calls: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(RowMover, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return patch.object(RowMover, name, call)

    found: list[Step] = []
    before = 0
    with counted("read"), counted("write"):
        for batch in parts.prepared.dataloader(rank, world_size):
            calls.clear()
            loss, _ = parts.dmp(batch)
            loss.backward()
            parts.optimizer.step()
            traffic = cache_traffic(parts.dmp).values()
            moved = sum(table.bytes_read + table.bytes_written for table in traffic)
            found.append((len(calls), moved - before))
            before = moved
    return found


@pytest.fixture
def registry(tmp_path: Path, table: Path) -> Path:
    path = write_registry(tmp_path / "r.yaml", table, {"share": 0.5}, training={"steps": None})
    yaml = YAML(typ="safe")
    document: dict[str, Any] = yaml.load(path)
    document["cache"][0]["tables"] = ["t_item_0", "t_usr_0"]
    document["dataset"]["wrap"] = [
        {"use": "scars.hot_batches", "options": {"sessions": True, "window": 512}}
    ]
    with path.open("w", encoding="utf-8") as stream:
        YAML().dump(document, stream)
    return path


def test_steps_with_hot_batches_on_all_ranks_move_nothing(registry: Path) -> None:
    ranks = run_on_ranks(count_moves, 2, registry)
    steps = [list(map(sum, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
    assert sum(step == [0, 0] for step in steps) > 3
    assert any(moved for _, moved in steps)


def test_caches_that_make_no_sample_hot_are_refused_with_the_line(registry: Path) -> None:
    yaml = YAML(typ="safe")
    document: dict[str, Any] = yaml.load(registry)
    document["cache"][0]["options"]["policy"] = "lru"
    with registry.open("w", encoding="utf-8") as stream:
        YAML().dump(document, stream)
    (refused,) = run_on_ranks(train_each, 1, [Job(registry)])[0]
    assert isinstance(refused, str)
    assert re.search(r"r\.yaml:\d+ dataset\.wrap\[0\]: .*'t_item_0' \(lru\)", refused), refused


def test_both_sides_and_workers_train_on_the_same_batches(registry: Path) -> None:
    two_windows = {"steps": 16}
    jobs = [
        Job(registry, overrides=two_windows),
        Job(registry, variant="baseline", overrides=two_windows),
        Job(registry, overrides={**two_windows, "workers": 2}),
    ]
    results = run_on_ranks(train_each, 2, jobs)[0]
    for result in results:
        assert isinstance(result, Result), result
        assert np.abs(np.subtract(result.losses, results[0].losses)).max() < 1e-4
