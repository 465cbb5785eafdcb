"""Checkpoints of model, optimizer and reader together, each whole or absent."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.errors import RecdError

_NAME = re.compile(r"step-\d{9}")
# What a killed process leaves: a checkpoint not yet whole, and one half deleted.
_LEFTOVER = re.compile(r"\.step-\d{9}\.(partial|old)")
_PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a run came.

    Attributes:
        step: optimizer steps done.
        epoch: epochs of the reader completed.
        reader: the reader's position after the last batch that was trained on.
        losses: the mean loss over ranks of every step so far.
    """

    step: int = 0
    epoch: int = 0
    reader: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)

    def with_losses(self, losses: list[float]) -> Progress:
        """The same point with the loss curve up to it."""
        return replace(self, losses=list(losses))


class Checkpoints:
    """A folder of checkpoints, ``step-000000100`` and so on.

    A checkpoint is written under another name and renamed when every rank is done, and renamed
    again before it is deleted: a process killed at any moment leaves whole ones only.

    Args:
        folder: made where it is missing.
        keep: how many to keep, the newest.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def prepare(self, resume: bool) -> None:
        """Make the folder, and see whether a run may start there. For one process.

        Raises:
            RecdError: the folder cannot be written, or it holds checkpoints and the run is not to
                resume.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path)
        except OSError as error:
            raise RecdError(
                f"{self._folder}: cannot be written ({error.strerror}); set "
                "training.checkpoint.path to another folder"
            ) from error
        if not os.access(self._folder, os.W_OK):
            raise RecdError(f"{self._folder}: cannot be written; see training.checkpoint.path")
        newest = self.newest()
        if newest is not None and not resume:
            raise RecdError(
                f"{self._folder}: holds checkpoints of an earlier run (the newest is "
                f"{newest.name}); go on from it with --resume, or set training.checkpoint.path "
                "to another folder"
            )

    def newest(self) -> Path | None:
        """The newest checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def save(self, dmp: DistributedModelParallel, optimizer: Optimizer, progress: Progress) -> None:
        """Write a checkpoint and delete those that are too many. A collective call."""
        final = self._folder / f"step-{progress.step:09d}"
        partial = self._folder / f".{final.name}.partial"
        if dist.get_rank() == 0:
            partial.mkdir()
        dist.barrier()
        save(_state(dmp, optimizer), checkpoint_id=partial)
        if dist.get_rank() == 0:
            (partial / _PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
            for path in (*partial.iterdir(), partial):
                _sync(path)
            os.replace(partial, final)
            _sync(self._folder)
            for old in self._all()[: -self._keep]:
                dying = old.with_name(f".{old.name}.old")
                os.replace(old, dying)
                shutil.rmtree(dying)
        dist.barrier()

    def load(self, dmp: DistributedModelParallel, optimizer: Optimizer) -> Progress:
        """Load the newest checkpoint into model and optimizer; without one, the first step.

        A collective call. The number of ranks and the plan may differ from those of the run that
        saved the checkpoint.

        Raises:
            RecdError: the checkpoint does not fit the model, or is damaged.
        """
        chosen = [self.newest()]
        dist.broadcast_object_list(chosen)
        path = chosen[0]
        if path is None:
            return Progress()
        state = _state(dmp, optimizer)
        try:
            # Flattened, a table without rows on this rank would be missing from its state, which
            # torch takes for a checkpoint of before 2.4; one without optimizer state then fails.
            planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
            load(state, checkpoint_id=path, planner=planner)
            progress = Progress(**json.loads((path / _PROGRESS).read_text(encoding="utf-8")))
        except (CheckpointException, RuntimeError, ValueError, TypeError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            advice = "resume with the registry that the run was started with"
            if "optimizer.state" in reason:
                advice += (
                    " (column-wise tables have a row-wise Adagrad for each part of a row, which "
                    "tables in other shardings do not go on with, nor they with others')"
                )
            raise RecdError(
                f"{path}: cannot be loaded into this model and optimizer ({reason}); {advice}, or "
                "remove this checkpoint to go on from the one before"
            ) from error
        dmp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return progress

    def _all(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def _state(dmp: DistributedModelParallel, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
