"""Which checkpoint of a registry's run is meant."""

from __future__ import annotations

from pathlib import Path

from recd_plugins.errors import RecdError
from recd_plugins.registry import Registry
from recd_plugins.training.checkpoint_files.folder import checkpoints_in
from recd_plugins.training.checkpoint_files.manifest import MANIFEST
from recd_plugins.training.checkpoint_files.progress import read_progress, step_name


def chosen_checkpoint(registry: Registry, wanted: str) -> Path:
    """A checkpoint by what a user calls it.

    Args:
        registry: its ``training.checkpoint.path`` is looked into.
        wanted: ``newest``, ``best``, or the path of a checkpoint or a folder of some (the newest).

    Raises:
        RecdError: there is none; says what makes one.
    """
    if wanted not in ("newest", "best"):
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
    best_step: int | None = getattr(read_progress(newest), "best_step", None)
    if best_step is None:
        raise RecdError(
            f"{newest}: its run was not validated, so none is known as the best; leave out "
            "--checkpoint for the newest"
        )
    best = Path(folder) / step_name(best_step)
    if best not in checkpoints_in(Path(folder)):
        raise RecdError(f"{best}: the best checkpoint is gone; leave out --checkpoint")
    return best


def _newest(folder: Path, remedy: str) -> Path:
    found = checkpoints_in(folder)
    if not found:
        raise RecdError(f"{folder}: holds no checkpoint; {remedy}")
    return found[-1]
