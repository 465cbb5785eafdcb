"""Checkpoints of runs with tiers go on without them, and on other ranks, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.training.job_cases import losses_of_jobs

from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job

from .conftest import ELSEWHERE, MakeRegistry

TIERS, ROW_WISE = "flexshard.three_tier", "torchrec.row_wise"


def test_checkpoints_are_those_of_tables_without_tiers(
    make_registry: MakeRegistry, tmp_path: Path
) -> None:
    """Tiers on 4 ranks, none on 2, tiers on 4 again, against row-wise tables all the way."""
    path = make_registry(TIERS, {"plan_for": ELSEWHERE, "dedupe": "none", "retier_every": 2})
    (tmp_path / "tiers").mkdir()
    (tmp_path / "rows").mkdir()

    def job(sharding: str, folder: str, ranks: int, steps: int) -> Job:
        overrides = {
            "ranks": ranks,
            "ranks_per_node": ranks // 2,
            "steps": steps,
            "learning_rate": 0.1,
            "eps": 1e-3,
            "checkpoint": {"path": str(tmp_path / folder)},
        }
        return Job(path, overrides=overrides, sharding=sharding)

    for ranks, steps, sharding in ((4, 3, TIERS), (2, 6, ROW_WISE), (4, 9, TIERS)):
        jobs = [job(sharding, "tiers", ranks, steps), job(ROW_WISE, "rows", ranks, steps)]
        done = run_on_ranks(losses_of_jobs, ranks, jobs, local_world_size=ranks // 2)[0]
        with_tiers, without = done
        assert len(with_tiers) == steps
        assert with_tiers == pytest.approx(without, abs=1e-6)
    # Row-wise Adagrad has one number for each part of a row there.
    jobs = [job("torchrec.column_wise", "rows", 4, 10)]
    (refused,) = run_on_ranks(losses_of_jobs, 4, jobs, local_world_size=2)[0]
    assert "step-000000009: cannot be loaded into this model" in refused
