"""What the ranks of ``test_training_from_s3`` do."""

from __future__ import annotations

import pytest

from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job, train


def train_each(
    rank: int, world_size: int, jobs: list[Job], environment: dict[str, str]
) -> list[Result]:
    """Ranks may have been started by another test, in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return [train(rank, world_size, job) for job in jobs]
