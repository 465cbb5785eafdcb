"""Hot batches in training: the backing store rests, all sides and workers see the same batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tests.small_registry import sections_over

from recd_plugin_scars.runtime.kernel import cache_traffic
from recd_plugin_scars.runtime.stores import RowMover
from recd_plugin_scars.tests.cache_cases import ROWS, train_each, write_registry
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
    found: list[Step] = []
    before = 0
    with (
        patch.object(RowMover, "read", autospec=True, side_effect=RowMover.read) as read,
        patch.object(RowMover, "write", autospec=True, side_effect=RowMover.write) as write,
    ):
        for batch in parts.prepared.dataloader(rank, world_size):
            read.reset_mock()
            write.reset_mock()
            loss, _ = parts.dmp(batch)
            loss.backward()
            parts.optimizer.step()
            traffic = cache_traffic(parts.dmp).values()
            moved = sum(table.bytes_read + table.bytes_written for table in traffic)
            found.append((read.call_count + write.call_count, moved - before))
            before = moved
    return found


def registry(folder: Path, table: Path, **options: Any) -> Path:
    options |= {"share": 0.5}
    cache = {"use": "scars.cache", "tables": ["t_item_0", "t_usr_0"], "options": options}
    wrap = {"use": "scars.hot_batches", "options": {"sessions": True, "window": 512}}
    sections = sections_over(table, ROWS)
    sections["dataset"]["wrap"] = [wrap]
    sections |= {"cache": [cache], "training": {"steps": None}}
    return write_registry(folder / "r.yaml", table, **sections)


def test_steps_with_hot_batches_on_all_ranks_move_nothing(tmp_path: Path, table: Path) -> None:
    ranks = run_on_ranks(count_moves, 2, registry(tmp_path, table))
    steps = [list(map(sum, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
    assert sum(step == [0, 0] for step in steps) > 3
    assert any(moved for _, moved in steps)


def test_caches_that_make_no_sample_hot_are_refused_with_the_line(
    tmp_path: Path, table: Path
) -> None:
    job = Job(registry(tmp_path, table, policy="lru"))
    (refused,) = run_on_ranks(train_each, 1, [job])[0]
    assert isinstance(refused, str)
    assert re.search(r"r\.yaml:\d+ dataset\.wrap\[0\]: .*'t_item_0' \(lru\)", refused), refused


def test_both_sides_and_workers_train_on_the_same_batches(tmp_path: Path, table: Path) -> None:
    path, two_windows = registry(tmp_path, table), {"steps": 16}
    jobs = [
        Job(path, overrides=two_windows),
        Job(path, variant="baseline", overrides=two_windows),
        Job(path, overrides={**two_windows, "workers": 2}),
    ]
    results = run_on_ranks(train_each, 2, jobs)[0]
    for result in results:
        assert isinstance(result, Result), result
        assert np.abs(np.subtract(result.losses, results[0].losses)).max() < 1e-4
