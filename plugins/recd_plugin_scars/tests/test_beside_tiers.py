"""A cached table, and one with an optimizer of its own, beside tiers in one EmbeddingCollection."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from recd_plugin_scars.report import CacheReport
from recd_plugin_scars.tests.cache_cases import SEQUENCES, train_each, write_registry
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_dcp import read_weights
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job

STEPS = 6


def job(folder: Path, table: Path, **sections: Any) -> Job:
    of_third = {"learning_rate": 0.05}
    adagrad = {"use": "torchrec.adagrad", "tables": SEQUENCES[2:], "options": of_third}
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint = {"path": str(folder / "checkpoints"), "every": STEPS}
    training = {"optimizer": "sgd", "steps": STEPS, "checkpoint": checkpoint}
    sections |= {"optimizers": [adagrad], "training": training}
    return Job(write_registry(folder / "registry.yaml", table, **sections))


def test_training_stays_what_it_was(table: Path, tmp_path: Path) -> None:
    tiers = {"use": "flexshard.two_tier", "tables": SEQUENCES[:1]}
    cache = {"use": "scars.cache", "tables": SEQUENCES[1:2], "options": {"rows": 100}}
    jobs = [
        job(tmp_path / "plain", table),
        job(tmp_path / "beside", table, sharding=[tiers], cache=[cache]),
    ]
    found = run_on_ranks(train_each, 2, jobs)[0]
    assert not any(isinstance(each, str) for each in found), found
    plain, beside = cast("list[Result]", found)
    assert max(plain.losses) - min(plain.losses) > 1e-4  # it learns
    assert np.abs(np.subtract(beside.losses, plain.losses)).max() <= 1e-6
    weights, expected = (
        read_weights(tmp_path / name / "checkpoints" / f"step-{STEPS:09d}")
        for name in ("beside", "plain")
    )
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    report = beside.sections["caches"]
    assert isinstance(report, CacheReport)
    (cached,) = report.tables
    assert cached.name == SEQUENCES[1]
    assert cached.observed.misses > 0
    assert "tiers" in beside.sections
