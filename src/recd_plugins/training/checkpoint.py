"""Checkpoints of model, optimizer and reader together, each whole or absent."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.data.fitted_state import FittedState
from recd_plugins.errors import RecdError
from recd_plugins.file_lock import locked_folder
from recd_plugins.training.agreement import from_rank_0, together
from recd_plugins.training.checkpoint_files.arrays import FITTED, RANKS, write_arrays
from recd_plugins.training.checkpoint_files.errors import DamagedError, damaged
from recd_plugins.training.checkpoint_files.fields import IDENTITY
from recd_plugins.training.checkpoint_files.folder import (
    check_newest,
    checkpoints_in,
    clean,
    delete,
    partial_of,
    put,
    set_aside,
    sync,
)
from recd_plugins.training.checkpoint_files.former_names import as_named_now
from recd_plugins.training.checkpoint_files.manifest import (
    MANIFEST,
    FileDigest,
    differing,
    digest_of,
    manifest_text,
    misfits,
    read_manifest,
)
from recd_plugins.training.checkpoint_files.metadata import METADATA, read_metadata
from recd_plugins.training.checkpoint_files.progress import (
    PROGRESS,
    Progress,
    progress_text,
    read_progress,
    step_name,
)
from recd_plugins.training.checkpoint_io import (
    SafeLoadPlanner,
    SafeReader,
    SafeSavePlanner,
    TellingWriter,
)
from recd_plugins.training.checkpoint_state import (
    CheckpointState,
    check_names,
    check_optimizer,
    common_name,
    make_state,
    trained_names,
)
from recd_plugins.training.identity import check_resumable, identity_text
from recd_plugins.training.rank_state import (
    buffers_of_rank_0,
    of_all_ranks,
    put_back,
    rank_state,
    read_rank_state,
)
from recd_plugins.words import shortened

__all__ = ["Checkpoints", "Progress"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Checkpoints:
    """A folder of checkpoints, ``step-000000100`` and so on.

    A checkpoint is written under another name and renamed when every rank is done, and renamed
    again before it is deleted: a process killed at any moment leaves whole ones only. What was
    damaged since shows when it is loaded, by the digests in its manifest.

    Args:
        folder: made where it is missing.
        keep: how many to keep, the newest, and the best besides where the run is validated.
        identity: of the run, as ``identity_of`` gives it, on rank 0: written into checkpoints, and
            only those are loaded that are of an equal run. None neither writes nor compares it.
        allowed: fields of it that may differ.
        fitted: what preprocessing was fitted to be, by ``fitted_state``, on rank 0.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        identity: Mapping[str, Any] | None = None,
        allowed: Collection[str] = (),
        fitted: FittedState | None = None,
    ) -> None:
        self._fitted = fitted
        self._folder = Path(folder)
        self._keep = keep
        self._identity = identity
        self._allowed = allowed

    @contextmanager
    def reserve(self, resume: bool) -> Iterator[None]:
        """A context in which one run writes here, and no other. For one process of the run.

        What earlier runs left in the folder is removed.

        Raises:
            RecdError: the folder cannot be written, another run writes it, or it holds checkpoints
                and the run is not to resume.
        """
        with ExitStack() as stack:
            try:
                locks_work = stack.enter_context(locked_folder(self._folder))
            except OSError as error:
                raise RecdError(
                    f"{self._folder}: cannot be written ({error.strerror or error}); set "
                    "training.checkpoint.path to another folder"
                ) from error
            if not locks_work:
                click.echo(
                    f"{self._folder}: is on a file system without locks; see that no other run "
                    "writes there",
                    err=True,
                )
            clean(self._folder)
            newest = self.newest()
            if newest is not None and not resume:
                raise RecdError(
                    f"{self._folder}: holds checkpoints of an earlier run (the newest is "
                    f"{newest.name}); go on from it with --resume, or set training.checkpoint.path "
                    "to another folder"
                )
            yield

    def newest(self) -> Path | None:
        """The newest checkpoint, damaged or not."""
        found = checkpoints_in(self._folder)
        return found[-1] if found else None

    def of_step(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, whether it exists or not."""
        return self._folder / step_name(step)

    def save(self, dmp: DistributedModelParallel, optimizer: Optimizer, progress: Progress) -> None:
        """Write a checkpoint and delete those that are too many. A collective call.

        Raises:
            SetupError: ``optimizer`` lacks what tables have learned by.
            RecdError: it cannot be written, or there is one of a later step; those that are there
                are as they were.
        """
        check_optimizer(dmp, optimizer)
        text = progress_text(progress)
        final = self.of_step(progress.step)
        together(lambda: check_newest(final) if dist.get_rank() == 0 else None)
        state, own = CheckpointState.of(dmp, optimizer), rank_state(dmp)
        partial = from_rank_0(partial_of(final))
        try:
            together(lambda: partial.mkdir() if dist.get_rank() == 0 else None)
            with buffers_of_rank_0(dmp):  # else any rank's: DCP has one that writes little write it
                save(
                    state.document, storage_writer=TellingWriter(partial), planner=SafeSavePlanner()
                )
            told = together(lambda: (_digests_of_rank(partial), own))
            digests = [of_rank for of_rank, _ in told]
            ranks = of_all_ranks([of_rank for _, of_rank in told])
            together(
                lambda: self._publish(partial, final, text, digests, ranks, progress.best_step)
            )
        except (CheckpointException, OSError, RecdError) as error:
            sizes = together(state.num_bytes)
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            free = from_rank_0(_free_bytes(self._folder))
            raise _cannot_be_written(final, error, sum(sizes), free) from error

    def load(self, dmp: DistributedModelParallel, optimizer: Optimizer) -> Progress:
        """Load the newest whole checkpoint into model and optimizer; without any, the first step.

        A collective call. The number of ranks and the plan may differ from those of the run that
        saved the checkpoint. On as many ranks as that had, generators of random numbers go on where
        each rank's were, and buffers are those that it had. One that is damaged is named on stderr
        and set aside, and the one before it is taken.

        Raises:
            RecdError: the checkpoint does not fit the model or is of another run, or none is whole,
                or two parameters of the model would have one name in checkpoints; or as ``save``.
        """
        check_optimizer(dmp, optimizer)
        together(lambda: check_names(name for name, _ in dmp.named_parameters()))
        damaged: dict[Path, str] = {}
        for path in reversed(from_rank_0(checkpoints_in(self._folder))):
            damage = _damage(path)
            if damage:
                damaged[path] = damage[0]
                continue
            progress = self._load(path, dmp, optimizer)
            if dist.get_rank() == 0:
                for each, reason in damaged.items():
                    aside = set_aside(each)
                    click.echo(
                        f"{each.name} is damaged and now {aside.name} ({reason}); "
                        f"going on from {path.name}",
                        err=True,
                    )
            return progress
        if damaged:
            reasons = "; ".join(damaged.values())
            raise RecdError(
                f"{self._folder}: no checkpoint is whole ({reasons}); put back a copy of one, or "
                "start anew in another folder"
            )
        return Progress()

    def rank_state(self, step: int) -> dict[str, np.ndarray]:
        """What this rank had of its own, as ``read_rank_state`` has it.

        Args:
            step: of the checkpoint that was loaded; 0 for none.
        """
        return read_rank_state(self.of_step(step)) if step else {}

    def load_one(self, path: Path, dmp: DistributedModelParallel) -> Progress:
        """Load this checkpoint into a model that is to score. A collective call.

        Raises:
            RecdError: it does not fit the model, or is of another run.
            DamagedError: it is not as it was written.
        """
        if damage := _damage(path):
            raise damaged(damage)
        return self._load(path, dmp, None)

    def _load(
        self, path: Path, dmp: DistributedModelParallel, optimizer: Optimizer | None
    ) -> Progress:
        """As ``load``; without an optimizer only the weights are loaded."""
        progress = read_progress(path)
        told = together(lambda: self._differences(path))[0]
        if told and dist.get_rank() == 0:
            click.echo(f"going on from {path.name}, where {'; '.join(told)}", err=True)
        try:
            contents = as_named_now(read_metadata(path), lambda: map(common_name, dmp.state_dict()))
            if optimizer is not None:
                make_state(optimizer, contents.entries)
            state = CheckpointState.of(dmp, optimizer)
            lacking = together(lambda: state.leave_out_steps(contents.entries))
            trained = together(lambda: trained_names(optimizer))  # some may be frozen
            planner = SafeLoadPlanner({name for of_rank in trained for name in of_rank})
            load(state.document, storage_reader=SafeReader(path, contents), planner=planner)
            state.put_back(dmp, optimizer, progress.step)
            tables = sorted({name for of_rank in lacking for name in of_rank})
            if tables and dist.get_rank() == 0:
                click.echo(
                    f"{path.name} is of an earlier version, which did not note by how many steps "
                    f"the optimizer of {shortened(tables)} learns: taken for the {progress.step} "
                    "that were trained",
                    err=True,
                )
        except (
            AssertionError,  # of a collision map whose rows other ranks had
            CheckpointException,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:
            if isinstance(refused := _own(error), RecdError):
                raise refused from error
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
        if optimizer is not None:
            together(lambda: put_back(dmp, read_rank_state(path)))
        return progress

    def _differences(self, path: Path) -> list[str]:
        if dist.get_rank() != 0 or self._identity is None:
            return []
        return check_resumable(path, self._identity, self._allowed)

    def _publish(
        self,
        partial: Path,
        final: Path,
        progress: str,
        digests: list[dict[str, FileDigest]],
        ranks: Mapping[str, np.ndarray],
        best_step: int | None,
    ) -> None:
        """Complete the files, and let the checkpoint appear; what rank 0 does."""
        if dist.get_rank() != 0:
            return
        files = {name: digest for each in digests for name, digest in each.items()}
        texts = {PROGRESS: progress}
        if self._identity is not None:
            texts[IDENTITY] = identity_text(self._identity)
        if self._fitted:
            arrays = {name: each.numpy() for name, each in self._fitted.items()}
            files[FITTED] = write_arrays(partial / FITTED, arrays)
        files[RANKS] = write_arrays(partial / RANKS, ranks)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
            files[name] = digest_of(partial / name)
        if damage := misfits(partial, files)[0]:
            raise RecdError(
                f"{damage[0]}, as this process sees it; training.checkpoint.path has to be a "
                "folder that all ranks share"
            )
        read_metadata(partial)  # what a torch writes that this version does not read is told now
        (partial / MANIFEST).write_text(manifest_text(files), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        put(partial, final)
        for old in checkpoints_in(self._folder)[: -self._keep]:
            if best_step is not None and old.name == step_name(best_step):
                continue
            try:
                delete(old)
            except OSError as error:  # of a run that goes on: the new one is whole
                reason = error.strerror or error
                click.echo(f"{old}: is no longer needed and cannot be removed ({reason})", err=True)


def _digests_of_rank(partial: Path) -> dict[str, FileDigest]:
    """Of the files that this rank wrote, by the names that DCP gives them."""
    rank = dist.get_rank()
    own = [path.name for path in partial.glob(f"__{rank}_*")] + [METADATA] * (rank == 0)
    return {name: digest_of(partial / name) for name in own}


def _damage(path: Path) -> list[str]:
    """What is wrong with the files of a checkpoint, which all ranks read, each its share."""

    def manifest() -> tuple[dict[str, FileDigest], list[str]]:
        if dist.get_rank() != 0:
            return {}, []
        try:
            files = read_manifest(path)
            return files, misfits(path, files)[0]
        except (DamagedError, OSError) as error:
            return {}, [str(error)]

    files, damage = together(manifest)[0]
    if damage:
        return damage
    largest_first = sorted(files, key=lambda name: -files[name].bytes)
    share = largest_first[dist.get_rank() :: dist.get_world_size()]
    found = together(lambda: differing(path, {name: files[name] for name in share}))
    return [each for of_rank in found for each in of_rank]


def _own(error: BaseException) -> Exception | None:
    """What this package or the operating system said, on whichever rank."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    for each in (error, *(failure for failure, *_ in failures)):
        if isinstance(each, OSError | RecdError):
            return each
    return None


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _cannot_be_written(
    path: Path, error: BaseException, num_bytes: int, free: int | None
) -> RecdError:
    cause = _own(error)
    if isinstance(cause, RecdError):
        return cause
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    if isinstance(cause, OSError):
        reason = cause.strerror or str(cause)
        if cause.errno in _FULL and free is not None:
            reason += f": its tensors take {num_bytes:,} bytes, and {free:,} are free"
    before = checkpoints_in(path.parent)
    left = "the checkpoints before it are as they were, and --resume goes on from them"
    return RecdError(
        f"{path}: cannot be written ({reason}); {left if before else 'there is none before it'}"
    )
