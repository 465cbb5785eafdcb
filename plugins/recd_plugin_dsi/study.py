"""Measures this machine and plans readers for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recd_plugin_dsi.measure import measure, without_stores
from recd_plugin_dsi.readers_report import ReaderPlan
from recd_plugins.api import Job, RunConfig, available_cores, choose_device, wrapped_dataset


def study_readers(
    registry: RunConfig,
    plugins_dir: Path | None,
    batch_size: int,
    target: float,
    show: Callable[[str], None],
) -> ReaderPlan:
    """Read with one reader, train on ``training.ranks`` ranks, and plan.

    Args:
        registry: not prepared.
        plugins_dir: of the registry.
        batch_size: rows of a rank.
        target: of its time, what the trainer may wait.
        show: told what comes next.

    Raises:
        RecdError: reading or training does not go.
    """
    overrides = {"batch_size": batch_size, "checkpoint": {}, "ranks_per_node": None}
    registry = without_stores(registry.with_training(overrides))
    training = registry.training
    wrapped_dataset(registry).prepare()
    job = Job(
        registry.path,
        plugins_dir=plugins_dir,
        overrides=overrides,
        device=choose_device(registry),
        text=registry.text,
    )
    reading, trained, block = measure(registry, job, show)
    return ReaderPlan(
        reading=reading,
        training=trained,
        block=block,
        target=target,
        batch_size=batch_size,
        ranks=training.ranks,
        ranks_here=training.ranks,
        cores=available_cores(),
    )
