"""What ranks run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job, train


def train_under_each(
    rank: int, world_size: int, path: Path, overrides: dict[str, Any], shardings: list[str]
) -> list[Result]:
    """Without plugins, as the registry says, then with ``shardings`` for the same tables."""
    jobs = [
        Job(path, "baseline", overrides=overrides),
        Job(path, overrides=overrides),
        *(Job(path, overrides=overrides, sharding=name) for name in shardings),
    ]
    return [train(rank, world_size, job) for job in jobs]
