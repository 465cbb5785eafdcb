"""Validated runs, for processes of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recd_plugins.training.trainer import Job, train


def run(rank: int, world_size: int, path: Path, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train a registry, or go on from its checkpoints, and return its figures."""
    return train(rank, world_size, Job(path, settings=settings)).as_json()
