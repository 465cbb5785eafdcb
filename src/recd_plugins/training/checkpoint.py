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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.errors import RecdError

_NAME = re.compile(r"step-(\d{9})")
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

    A checkpoint is written beside its place and renamed when every rank is done, so a process
    killed at any moment leaves the earlier ones, and never half of one under that name.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def save(self, dmp: DistributedModelParallel, optimizer: Optimizer, progress: Progress) -> None:
        """Write a checkpoint and delete those that are too many. A collective call."""
        final = self._folder / f"step-{progress.step:09d}"
        partial = self._folder / f".{final.name}.partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        save(_state(dmp, optimizer), checkpoint_id=partial)
        if dist.get_rank() == 0:
            (partial / _PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
            _sync(partial)
            # A run that resumed from an older checkpoint writes the same step again.
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            for old in self._all()[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()

    def start(self, dmp: DistributedModelParallel, optimizer: Optimizer, resume: bool) -> Progress:
        """Where a run begins: at the newest checkpoint, which is loaded, or at the first step.

        A collective call. The number of ranks and the plan may differ from those of the run that
        saved the checkpoint.

        Raises:
            RecdError: there are checkpoints, and the run is not to resume; or the newest does not
                fit the model.
        """
        path = self.latest()
        if path is None:
            return Progress()
        if not resume:
            raise RecdError(
                f"{self._folder}: holds checkpoints of an earlier run (the newest is {path.name}); "
                "go on from it with --resume, or set training.checkpoint.path to another folder"
            )
        state = _state(dmp, optimizer)
        try:
            load(state, checkpoint_id=path)
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise RecdError(
                f"{path}: does not fit this model and optimizer ({reason}); resume with the "
                "registry that the run was started with"
            ) from error
        dmp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return Progress(**json.loads((path / _PROGRESS).read_text(encoding="utf-8")))

    def _all(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        found = (path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
        return sorted(path for path in found if (path / _PROGRESS).is_file())


def _state(dmp: DistributedModelParallel, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}


def _sync(folder: Path) -> None:
    """Have the contents on disk before the rename that declares them whole."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
