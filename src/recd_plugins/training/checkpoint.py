"""Checkpoints of model, optimizer and reader together, each whole or absent."""

from __future__ import annotations

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

from recd_plugins.data.preprocess import FittedState
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.folders import locked_folder
from recd_plugins.runtime.rank_agreement import from_rank_0, together
from recd_plugins.runtime.text import shortened
from recd_plugins.training.checkpoint_dcp import (
    SafeLoadPlanner,
    SafeReader,
    SafeSavePlanner,
    TellingWriter,
    as_named_now,
    read_metadata,
)
from recd_plugins.training.checkpoint_files import (
    FITTED,
    IDENTITY,
    MANIFEST,
    METADATA,
    PROGRESS,
    RANKS,
    DamagedError,
    FileDigest,
    Progress,
    check_newest,
    checkpoints_in,
    clean,
    damaged,
    delete,
    differing,
    digest_of,
    manifest_text,
    misfits,
    partial_of,
    progress_text,
    put,
    read_manifest,
    read_progress,
    set_aside,
    step_name,
    sync,
    write_arrays,
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

__all__ = ["Checkpoints", "Progress"]


class Checkpoints:
    """A folder of checkpoints, ``step-000000100`` and so on.

    A checkpoint is written under a hidden name and renamed when every rank is done, and renamed
    again before it is deleted: a kill at any moment leaves whole ones only. Later damage shows
    when it is loaded, by the digests in its manifest.

    Args:
        folder: made if it is missing.
        keep: how many of the newest to keep, and the best besides if the run is validated.
        identity: of the run, by ``identity_of``, on rank 0. It is written, and a checkpoint of
            another run is refused. None does neither.
        allowed: fields of it that may differ.
        fitted: state of fitted preprocessing, by ``fitted_state``, on rank 0.
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
        """Keep other runs from writing here, and remove leftovers. For one process of the run.

        Raises:
            RecdError: the folder cannot be written, another run writes it, or it holds checkpoints
                and the run does not resume.
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
                _say(
                    f"{self._folder}: is on a file system without locks; see that no other run "
                    "writes there"
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
        """Return the newest checkpoint, damaged or not."""
        found = checkpoints_in(self._folder)
        return found[-1] if found else None

    def of_step(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, whether it exists or not."""
        return self._folder / step_name(step)

    def save(self, dmp: DistributedModelParallel, optimizer: Optimizer, progress: Progress) -> None:
        """Write a checkpoint and delete the oldest ones. Collective.

        Raises:
            SetupError: ``optimizer`` lacks state of the tables.
            RecdError: it cannot be written, or a later step is there; existing checkpoints stay.
        """
        check_optimizer(dmp, optimizer)
        text = progress_text(progress)
        final = self.of_step(progress.step)
        together(lambda: check_newest(final) if dist.get_rank() == 0 else None)
        state, own = CheckpointState.of(dmp, optimizer), rank_state(dmp)
        partial = from_rank_0(partial_of(final))
        try:
            together(lambda: partial.mkdir() if dist.get_rank() == 0 else None)
            with buffers_of_rank_0(dmp):  # DCP lets any rank write them
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
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise from_rank_0(_cannot_be_written(final, error)) from error

    def load(self, dmp: DistributedModelParallel, optimizer: Optimizer) -> Progress:
        """Load the newest whole checkpoint; return the first step if there is none. Collective.

        The number of ranks and the plan may differ from those of the run that saved it. On as many
        ranks, random generators and buffers are what each rank had. A damaged checkpoint is named
        on stderr and set aside, and the one before it is taken.

        Raises:
            RecdError: the checkpoint does not fit the model or is of another run, none is whole,
                or as ``save``.
        """
        check_optimizer(dmp, optimizer)
        together(lambda: check_names(name for name, _ in dmp.named_parameters()))
        damaged: dict[Path, str] = {}
        for path in reversed(from_rank_0(checkpoints_in(self._folder))):
            if damage := _damage(path):
                damaged[path] = damage[0]
                continue
            progress = self._load(path, dmp, optimizer)
            for each, reason in damaged.items() if dist.get_rank() == 0 else ():
                aside = set_aside(each)
                _say(
                    f"{each.name} is damaged and now {aside.name} ({reason}); "
                    f"going on from {path.name}"
                )
            return progress
        if damaged:
            raise RecdError(
                f"{self._folder}: no checkpoint is whole ({'; '.join(damaged.values())}); put back "
                "a copy of one, or start anew in another folder"
            )
        return Progress()

    def rank_state(self, step: int) -> dict[str, np.ndarray]:
        """Return this rank's state in the checkpoint of a step; empty for step 0."""
        return read_rank_state(self.of_step(step)) if step else {}

    def load_one(self, path: Path, dmp: DistributedModelParallel) -> Progress:
        """Load the weights of this checkpoint, to score by them. Collective.

        Raises:
            RecdError: it does not fit the model, or is of another run.
            DamagedError: it was changed.
        """
        if damage := _damage(path):
            raise damaged(damage)
        return self._load(path, dmp, None)

    def _load(
        self, path: Path, dmp: DistributedModelParallel, optimizer: Optimizer | None
    ) -> Progress:
        progress = read_progress(path)
        if told := together(lambda: self._differences(path))[0]:
            _say(f"going on from {path.name}, where {'; '.join(told)}")
        try:
            metadata = as_named_now(read_metadata(path), lambda: map(common_name, dmp.state_dict()))
            stored = metadata.state_dict_metadata.keys()
            if optimizer is not None:
                make_state(optimizer, stored)
            state = CheckpointState.of(dmp, optimizer)
            lacking = together(lambda: state.leave_out_steps(stored))
            trained = together(lambda: trained_names(optimizer))  # some may be frozen
            planner = SafeLoadPlanner({name for of_rank in trained for name in of_rank})
            load(state.document, storage_reader=SafeReader(path, metadata), planner=planner)
            state.put_back(dmp, optimizer, progress.step)
            if tables := sorted({name for of_rank in lacking for name in of_rank}):
                _say(
                    f"{path.name} is of an earlier version, which did not note by how many steps "
                    f"the optimizer of {shortened(tables)} learns: taken for the {progress.step} "
                    "that were trained"
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
                    " (a column-wise table has a row-wise Adagrad for each part of a row, which "
                    "other shardings do not)"
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
        """Complete the files on rank 0, and rename the checkpoint to its final name."""
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
        read_metadata(partial)  # refuse now what a newer torch writes
        (partial / MANIFEST).write_text(manifest_text(files), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        put(partial, final)
        for old in checkpoints_in(self._folder)[: -self._keep]:
            if best_step is None or old.name != step_name(best_step):
                delete(old)


def _say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        click.echo(line, err=True)


def _digests_of_rank(partial: Path) -> dict[str, FileDigest]:
    """Return the digests of the files that this rank wrote, by the names that DCP gives them."""
    rank = dist.get_rank()
    own = [path.name for path in partial.glob(f"__{rank}_*")] + [METADATA] * (rank == 0)
    return {name: digest_of(partial / name) for name in own}


def _damage(path: Path) -> list[str]:
    """Return the damage of a checkpoint; each rank reads its share of the files."""

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
    """Return the error of this package or the operating system, of whichever rank."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    for each in (error, *(failure for failure, *_ in failures)):
        if isinstance(each, OSError | RecdError):
            return each
    return None


def _cannot_be_written(path: Path, error: BaseException) -> RecdError:
    cause = _own(error)
    if isinstance(cause, RecdError):
        return cause
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    if isinstance(cause, OSError):
        reason = cause.strerror or str(cause)
    left = "the checkpoints before it are as they were, and --resume goes on from them"
    return RecdError(
        f"{path}: cannot be written ({reason}); "
        f"{left if checkpoints_in(path.parent) else 'there is none before it'}"
    )
