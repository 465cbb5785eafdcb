"""Which checkpoint of a registry's run is meant."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.distributed.launch import torchrun_rank
from recd_plugins.errors import RecdError
from recd_plugins.registry import RunConfig
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.folder import checkpoints_in
from recd_plugins.training.checkpoint_files.manifest import MANIFEST
from recd_plugins.training.checkpoint_files.progress import read_progress, step_name


def chosen_checkpoint(registry: RunConfig, wanted: str | None = None) -> Path:
    """Find a checkpoint of a run and say which one is taken where that may surprise.

    Args:
        registry: its ``training.checkpoint.path`` is looked into.
        wanted: ``newest``, ``best``, or the path of a checkpoint or a folder of some (the newest).
            None takes the best of a validated run and the newest of any other.

    Raises:
        RecdError: there is none; says what makes one.
    """
    if wanted not in (None, "newest", "best"):
        path = Path(wanted)
        if (path / MANIFEST).exists():
            return path
        return _newest(path, f"name a checkpoint, or a folder of some; recd checkpoint list {path}")
    folder = registry.training.checkpoint.path
    if folder is None:
        raise RecdError(
            f"{registry.path}: training.checkpoint.path is not set, so no run leaves a trained "
            "model; set it and train, or name a checkpoint with --checkpoint"
        )
    newest = _newest(Path(folder), f"train first: recd run {registry.path}")
    if wanted == "newest":
        return newest
    if wanted is None:
        chosen, note = _best_or_newest(registry, newest)
        if note and torchrun_rank() in (None, 0):
            click.echo(f"{chosen}: {note}", err=True)
        return chosen
    best_step = read_progress(newest).best_step
    if best_step is None:
        raise RecdError(
            f"{newest}: its run was not validated, so there is no best checkpoint; use "
            "--checkpoint newest"
        )
    best = newest.with_name(step_name(best_step))
    if best not in checkpoints_in(newest.parent):
        raise RecdError(
            f"{best}: the best checkpoint is gone; take the newest with --checkpoint newest"
        )
    return best


def _best_or_newest(registry: RunConfig, newest: Path) -> tuple[Path, str]:
    """Return the checkpoint to take by default, and a note where it needs one."""
    try:
        progress = read_progress(newest)
    except DamagedError:  # told when it is loaded
        return newest, ""
    curve, validated = progress.validation, registry.training.validation is not None
    if curve is None or curve.best_step is None:
        return newest, "the newest is taken, as no validation has found a best" * validated
    best = newest.with_name(step_name(curve.best_step))
    if best == newest:
        return newest, ""
    if not validated and progress.step > curve.steps[-1]:
        return newest, (
            "the newest is taken: training continued after the last validation; --checkpoint best "
            f"takes {best.name}"
        )
    if best not in checkpoints_in(newest.parent):
        return newest, f"the newest is taken, as the best, {best.name}, is gone"
    return best, f"the best by {curve.metric} is taken; --checkpoint newest takes {newest.name}"


def _newest(folder: Path, remedy: str) -> Path:
    found = checkpoints_in(folder)
    if not found:
        raise RecdError(f"{folder}: holds no checkpoint; {remedy}")
    return found[-1]
