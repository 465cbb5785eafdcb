"""Atomic checkpoints of model, optimizer and data reader position."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from recd_plugins.data.preprocess import FittedState
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.folders import locked_folder
from recd_plugins.runtime.rank_agreement import from_rank_0, together
from recd_plugins.training.checkpoint_dcp import (
    SafeLoadPlanner,
    SafeReader,
    TellingWriter,
    as_named_now,
    read_metadata,
    read_own_metadata,
)
from recd_plugins.training.checkpoint_deltas import Deltas
from recd_plugins.training.checkpoint_files import (
    FITTED,
    IDENTITY,
    MANIFEST,
    METADATA,
    PROGRESS,
    RANKS,
    ROWS,
    DamagedError,
    DeltaOf,
    FileDigest,
    Progress,
    chain_of,
    checkpoints_in,
    clean,
    damaged,
    delete,
    differing,
    digest_of,
    hidden,
    manifest_text,
    misfits,
    progress_text,
    put,
    read_manifest,
    read_progress,
    set_aside,
    step_name,
    sync,
    write_arrays,
)
from recd_plugins.training.checkpoint_rows import (
    document_without,
    read_rows,
    tensors_of,
    write_rows,
)
from recd_plugins.training.checkpoint_state import (
    CheckpointState,
    check_optimizer,
    common_name,
    make_state,
)
from recd_plugins.training.identity import check_resumable, identity_text
from recd_plugins.training.rank_state import (
    buffers_of_rank_0,
    put_back,
    rank_state,
    read_rank_state,
)


class Checkpoints:
    """A folder of checkpoints, ``step-000000100`` and so on.

    If a process is killed, only complete checkpoints remain. Loading verifies SHA-256 digests.

    Args:
        folder: the folder; created if it is missing.
        keep: number of newest checkpoints to keep. The best checkpoint of a validated run is also
            kept.
        identity: the run's identity from ``identity_of``, on rank 0. It is written to checkpoints,
            and checkpoints with another identity are refused. None disables this check.
        allowed: fields of the identity that may differ.
        fitted: state of fitted preprocessing from ``fitted_state``, on rank 0.
        full_every: number of checkpoints from one full checkpoint to the next. Those between are
            deltas: they contain only the table rows that changed since the checkpoint before, and
            need all checkpoints back to the full one. 1 writes only full checkpoints.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        identity: Mapping[str, Any] | None = None,
        allowed: Collection[str] = (),
        fitted: FittedState | None = None,
        full_every: int = 1,
    ) -> None:
        self._fitted = fitted
        self._deltas = Deltas(Path(folder), full_every)
        self._folder = Path(folder)
        self._keep = keep
        self._identity = identity
        self._allowed = allowed

    @contextmanager
    def reserve(self, resume: bool) -> Iterator[None]:
        """Lock the folder for this run, and remove incomplete checkpoints.

        Refuse a folder with checkpoints unless ``resume``. Call this in one process of the run.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_folder(self._folder))
            except OSError as error:
                raise RecdError(
                    f"{self._folder}: the folder cannot be written ({error.strerror or error}). "
                    "Set training.checkpoint.path to another folder."
                ) from error
            clean(self._folder)
            newest = self.newest()
            if newest is not None and not resume:
                raise RecdError(
                    f"{self._folder}: the folder has checkpoints of an earlier run (newest: "
                    f"{newest.name}). Resume that run with --resume, or set "
                    "training.checkpoint.path to another folder."
                )
            yield

    def newest(self) -> Path | None:
        """Return the path of the newest checkpoint, even if damaged; None without checkpoints."""
        found = checkpoints_in(self._folder)
        return found[-1] if found else None

    def of_step(self, step: int) -> Path:
        """Return the path for the checkpoint of a step, which may not exist yet."""
        return self._folder / step_name(step)

    def save(self, dmp: DistributedModelParallel, optimizer: Optimizer, progress: Progress) -> None:
        """Write a checkpoint and delete the oldest ones. All ranks must call this.

        Raises:
            SetupError: ``optimizer`` lacks state of the tables.
            RecdError: the checkpoint cannot be written, or a checkpoint of a later step exists.
                Existing checkpoints stay.
        """
        check_optimizer(dmp, optimizer)
        text = progress_text(progress)
        final = self.of_step(progress.step)
        newest = from_rank_0(self.newest())
        if newest is not None and final.name < newest.name:  # a resume would load the newest
            raise RecdError(
                f"{final}: the folder already has a checkpoint of a later step, {newest.name}. "
                "Count steps from the Progress that load() returned, or use another folder."
            )
        state, own = CheckpointState.of(dmp, optimizer), rank_state(dmp)
        delta, rows = self._deltas.begin(dmp, state.document, final)
        document = state.document
        if delta is not None:
            document = document_without(document, delta.rows)
        partial = from_rank_0(hidden(final, "partial"))
        try:
            together(lambda: partial.mkdir() if dist.get_rank() == 0 else None)
            with buffers_of_rank_0(dmp):  # DCP lets any rank write them
                save(document, storage_writer=TellingWriter(partial), planner=DefaultSavePlanner())

            def written() -> tuple[dict[str, FileDigest], dict[str, np.ndarray]]:
                write_rows(partial, rows)
                return _digests_of_rank(partial), own

            told = together(written)
            files = {name: digest for digests, _ in told for name, digest in digests.items()}
            ranks = {
                f"{rank} {name}": array
                for rank, (_, state_of_rank) in enumerate(told)
                for name, array in state_of_rank.items()
            }
            best = progress.best_step
            together(lambda: self._publish(partial, final, text, files, ranks, best, delta))
        except (CheckpointException, OSError, RecdError) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise from_rank_0(_cannot_be_written(final, error)) from error
        self._deltas.saved(final, state.document)

    def load(self, dmp: DistributedModelParallel, optimizer: Optimizer) -> Progress:
        """Load the newest undamaged checkpoint and return its progress, or step 0 without one.

        All ranks must call this, before the first batch. The number of ranks and the plan may
        differ from the run that saved the checkpoint. With the same number of ranks, each rank
        restores its random generators and buffers. A damaged checkpoint is reported on stderr and
        renamed; then the previous one is loaded.

        Raises:
            RecdError: the checkpoint does not fit the model or belongs to another run, or all
                checkpoints are damaged.
            SetupError: ``optimizer`` lacks state of the tables.
        """
        check_optimizer(dmp, optimizer)
        broken: dict[Path, str] = {}
        checked: dict[Path, list[str]] = {}
        for path in reversed(from_rank_0(checkpoints_in(self._folder))):
            if damage := _damage(path, checked):
                broken[path] = damage[0]
                continue
            progress = self._load(path, dmp, optimizer)
            self._deltas.loaded(path, dmp)
            for each, reason in broken.items() if dist.get_rank() == 0 else ():
                aside = set_aside(each)
                _say(
                    f"{each.name} is damaged and was renamed to {aside.name} ({reason}); "
                    f"resuming from {path.name}"
                )
            return progress
        if broken:
            raise RecdError(
                f"{self._folder}: all checkpoints are damaged ({'; '.join(broken.values())}). "
                "Restore an undamaged copy, or train from the start in another folder."
            )
        self._deltas.loaded(None, dmp)
        return Progress()

    def rank_state(self, step: int) -> dict[str, np.ndarray]:
        """Return this rank's generators and buffers saved at ``step``; empty for step 0."""
        return read_rank_state(self.of_step(step)) if step else {}

    def load_one(self, path: Path, dmp: DistributedModelParallel) -> Progress:
        """Load one checkpoint, weights only. All ranks must call this."""
        if damage := _damage(path):
            raise damaged(damage)
        return self._load(path, dmp, None)

    def _load(
        self, path: Path, dmp: DistributedModelParallel, optimizer: Optimizer | None
    ) -> Progress:
        progress = read_progress(path)
        identity = self._identity  # None on all ranks but 0
        told, *_ = together(
            lambda: [] if identity is None else check_resumable(path, identity, self._allowed)
        )
        if told:
            _say(f"resuming from {path.name} with changed settings: {'; '.join(told)}")
        try:
            metadata = as_named_now(read_metadata(path), lambda: map(common_name, dmp.state_dict()))
            stored = metadata.state_dict_metadata.keys()
            if optimizer is not None:
                make_state(optimizer, stored)
            state = CheckpointState.of(dmp, optimizer)
            state.leave_out_steps(stored)
            own = [common_name(name) for name in getattr(optimizer, "params", ())]
            trained = together(lambda: own)  # some parameters may be frozen
            planner = SafeLoadPlanner({name for of_rank in trained for name in of_rank})
            load(state.document, storage_reader=SafeReader(path, metadata), planner=planner)
            read_rows(path, tensors_of(state.document))
            state.put_back(dmp, optimizer, progress.step)
        except (
            AssertionError,  # buffers of a collision map that belong to rows of other ranks
            CheckpointException,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:
            if isinstance(refused := _own(error), RecdError):
                raise refused from error
            raise RecdError(
                f"{path}: the checkpoint cannot be loaded into this model and optimizer "
                f"({_reason(error)}). Resume with the registry file that started the run, or "
                "delete this checkpoint to resume from the previous checkpoint."
            ) from error
        if optimizer is not None:
            together(lambda: put_back(dmp, read_rank_state(path)))
        return progress

    def _publish(
        self,
        partial: Path,
        final: Path,
        progress: str,
        files: dict[str, FileDigest],
        ranks: Mapping[str, np.ndarray],
        best_step: int | None,
        delta: DeltaOf | None,
    ) -> None:
        """On rank 0, write all files except DCP's, and rename the checkpoint to its final name."""
        if dist.get_rank() != 0:
            return
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
                f"{damage[0]}, but a rank has written this file. Set training.checkpoint.path to a "
                "folder that all ranks share."
            )
        read_own_metadata(partial)  # fails now if loading would refuse these classes
        (partial / MANIFEST).write_text(manifest_text(files, delta), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        put(partial, final)
        for old in reversed(self._unneeded(best_step)):  # deltas before those that they need
            delete(old)

    def _unneeded(self, best_step: int | None) -> list[Path]:
        """Return the checkpoints to delete, oldest first.

        Keep the latest ones, the latest full ones, the best one, and those that these need.
        """
        every = checkpoints_in(self._folder)
        chains, full = {path: [path] for path in every}, []
        for path in every:
            with suppress(RecdError, OSError):  # damage is reported when it is loaded
                chains[path] = chain_of(path)
                full += [path] * (len(chains[path]) == 1)
        kept = {*every[-self._keep :], *full[-self._keep :]}
        if best_step is not None:
            kept.add(self.of_step(best_step))
        needed = {link for path in kept & chains.keys() for link in chains[path]}
        return [path for path in every if path not in needed]


def _say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        click.echo(line, err=True)


def _digests_of_rank(partial: Path) -> dict[str, FileDigest]:
    rank = dist.get_rank()
    own = [path.name for path in partial.glob(f"__{rank}_*")] + [METADATA] * (rank == 0)
    own += [path.name for path in partial.glob(f"rows-{rank}-*{ROWS}")]
    return {name: digest_of(partial / name) for name in own}


def _damage(path: Path, checked: dict[Path, list[str]] | None = None) -> list[str]:
    """Return descriptions of damage to a checkpoint, or to one that a delta needs.

    ``checked`` has the results for checkpoints that were read before, and is extended.
    """
    checked = {} if checked is None else checked

    def chain() -> tuple[list[Path], str | None]:
        try:
            return (chain_of(path) if dist.get_rank() == 0 else []), None
        except (DamagedError, OSError) as error:
            return [], str(error)

    links, broken = together(chain)[0]
    if broken is not None:
        return [broken]
    for link in links:
        if link not in checked:
            checked[link] = _damage_of_one(link)
        if damage := checked[link]:
            return damage
    return []


def _damage_of_one(path: Path) -> list[str]:
    """Return a description of each damaged file; each rank checks some of the files."""

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
    """Return the RecdError or OSError of any rank from which ``error`` was raised, or None."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    for each in (error, *(failure for failure, *_ in failures)):
        if isinstance(each, OSError | RecdError):
            return each
    return None


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _cannot_be_written(path: Path, error: BaseException) -> RecdError:
    cause = _own(error)
    if isinstance(cause, RecdError):
        return cause
    reason = cause.strerror if isinstance(cause, OSError) else _reason(error)
    return RecdError(
        f"{path}: the checkpoint cannot be written ({reason}). Fix the cause, then resume from the "
        "previous checkpoint with --resume."
    )
