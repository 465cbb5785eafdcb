"""Run folders, such as ``runs/clicks/3``: the checkpoints, settings and results of one run.

Does not import torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from recd_plugins.config import RunConfig
from recd_plugins.config.document import names_table
from recd_plugins.config.from_file import load_registry
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.files import parse_json, read_note, write_json, write_note
from recd_plugins.runtime.launch import torchrun_rank
from recd_plugins.training.checkpoint_files import (
    MANIFEST,
    checkpoints_in,
    read_progress,
    step_name,
)

#: Files of a run folder: how the run was started, and what ``recd run --json`` writes.
SETTINGS, RESULT = "run.json", "result.json"
R = TypeVar("R", bound=RunConfig)


@dataclass(frozen=True)
class RunSettings:
    """How a run was started.

    Attributes:
        registry: absolute path of the registry file.
        text: content of the registry file.
        settings: the ``KEY=VALUE`` arguments of ``recd run``.
        options: fields of ``training`` set by options such as ``--steps``. Other commands, and
            ``recd run --resume``, ignore them.
        plugins_dir: folder of ``--plugins-dir``, if given.
        started: time in UTC.
    """

    registry: str
    text: str
    settings: tuple[str, ...]
    options: Mapping[str, Any]
    plugins_dir: str | None
    started: str

    @classmethod
    def of(
        cls,
        registry: RunConfig,
        settings: Sequence[str],
        options: Mapping[str, Any],
        plugins_dir: Path | None,
    ) -> RunSettings:
        """Return the settings of a run that starts now."""
        folder = None if plugins_dir is None else str(plugins_dir.resolve())
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
        path, text = str(registry.path.resolve()), registry.text or ""
        return cls(path, text, tuple(settings), dict(options), folder, now)


def generated_registry(table: str | Path) -> Path:
    """Return the path of the registry file that ``recd run`` generates for a table."""
    return Path(".recd") / f"{Path(table).resolve().name or 'table'}.yaml"


def read_settings(folder: Path) -> RunSettings:
    """Read how the run of a folder was started.

    Raises:
        RecdError: ``folder`` is not a run folder.
    """
    found = read_note(folder / SETTINGS)
    try:
        settings = RunSettings(**found or {})
    except TypeError as error:
        raise RecdError(
            f"{folder}: this is not a folder that recd run has written. Use a run folder, such as "
            "runs/clicks/3, or a registry file."
        ) from error
    return RunSettings(**{**asdict(settings), "settings": tuple(settings.settings)})


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def find_run(folder: Path, number: int | None = None, *, trained: bool = True) -> Path:
    """Return a run folder: ``folder`` itself, its run ``number``, or the newest run in it.

    For the newest run, ``trained`` skips runs without a checkpoint, prefers finished runs, and
    prints which run is used.

    Raises:
        RecdError: there is no such run.
    """
    if (folder / SETTINGS).exists():
        return folder
    runs = runs_in(folder)
    if number is not None:
        if (run := folder / str(number)) in runs:
            return run
        names = ", ".join(path.name for path in runs) or "none"
        raise RecdError(f"{folder}: there is no run {number}. Use an existing run: {names}.")
    runs = [path for path in runs if not trained or checkpoints_in(path)]
    if not runs:
        raise RecdError(
            f"{folder}: no run in this folder has a checkpoint. Train with recd run first."
        )
    if not trained:
        return runs[-1]
    chosen = next((path for path in runs[::-1] if (path / RESULT).exists()), runs[-1])
    if torchrun_rank() in (None, 0):
        unfinished = "" if chosen == runs[-1] else f", because {runs[-1]} has not finished"
        click.echo(f"using {chosen}{unfinished}", err=True)
    return chosen


def runs_folder(registry: RunConfig) -> Path | None:
    """Return the parent of the run folders of a registry file; None if the file sets none."""
    spec = registry.training.checkpoint
    return None if spec.runs is None or spec.path is not None else Path(spec.runs)


def refuse_run_folder(given: Path) -> None:
    """Raise RecdError if ``given`` is a run folder or a folder of runs."""
    for folder in (given, *runs_in(given)[-1:]):
        if not (folder / SETTINGS).exists():
            continue
        registry, run = os.path.relpath(read_settings(folder).registry), folder.resolve().name
        what = "run folder" if folder == given else "folder of runs"
        raise RecdError(f"{given} is a {what}. Use: recd run {registry} --resume --run {run}")


def settings_to_resume(registry: RunConfig, number: int | None) -> tuple[str, ...]:
    """Return the ``KEY=VALUE`` arguments of the run to resume; () without numbered run folders."""
    folder = runs_folder(registry)
    if folder is None or (number is None and not runs_in(folder)):
        return ()
    return read_settings(find_run(folder, number, trained=False)).settings


def in_folder(registry: R, folder: Path) -> R:
    """Return the registry with ``folder`` as its checkpoint folder."""
    return registry.with_training(checkpoint_in(registry, folder))


def checkpoint_in(registry: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the override of ``training`` that puts checkpoints into ``folder``."""
    spec = registry.training.checkpoint.model_copy(update={"path": str(folder)})
    return {"checkpoint": spec.model_dump()}


@contextmanager
def new_run(folder: Path, settings: RunSettings) -> Iterator[Path]:
    """Create the next run folder. Remove it if the block fails before the first checkpoint."""
    runs = runs_in(folder)
    number = int(runs[-1].name) + 1 if runs else 1
    while True:
        run = folder / str(number)
        try:
            run.mkdir(parents=True)
        except FileExistsError:  # another process created it in the meantime
            number += 1
        except OSError as error:
            raise RecdError(
                f"{run}: the run folder cannot be created ({error.strerror}). Set "
                "training.checkpoint.runs to another folder."
            ) from error
        else:
            break
    write_note(run / SETTINGS, asdict(settings))
    try:
        yield run
    except BaseException:
        if not checkpoints_in(run):
            shutil.rmtree(run, ignore_errors=True)
        raise


@contextmanager
def resumed_run(folder: Path, settings: RunSettings) -> Iterator[Path]:
    """Yield the folder of a run to resume. Store the new settings if it writes a checkpoint."""
    before, started = newest_step(folder), read_settings(folder).started
    try:
        yield folder
    finally:
        if newest_step(folder) > before:
            write_note(folder / SETTINGS, asdict(replace(settings, started=started)))


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder; 0 without one."""
    found = checkpoints_in(folder)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def write_result(folder: Path, report: Mapping[str, Any]) -> None:
    """Write the results of a finished run into its folder."""
    write_json(folder / RESULT, report)


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the results of the run in a folder; None if the run has not finished."""
    path = folder / RESULT
    return parse_json(path.read_bytes()) if path.exists() else None


# Trained models.


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint, and the registry and settings to load it with."""

    registry: RunConfig
    checkpoint: Path
    settings: tuple[str, ...]
    plugins_dir: Path | None


def find_trained(
    given: Path,
    run: int | None = None,
    checkpoint: str | None = None,
    settings: Sequence[str] = (),
    plugins_dir: Path | None = None,
) -> TrainedModel:
    """Find a trained model by its registry file or its run folder.

    A run folder has its own copy of the registry file. A registry file is read as it is now, with
    the ``KEY=VALUE`` arguments of the selected run.

    Args:
        given: a registry file, a table of ``recd run TABLE``, a run folder, or a folder of run
            folders (its newest run).
        run: number of the run; None selects the newest finished run.
        checkpoint: ``newest``, ``best`` or a path; None: the best of a validated run, or newest.
        settings: further ``KEY=VALUE`` arguments.
        plugins_dir: folder with additional plugin files; None uses that of the run.

    Raises:
        RecdError: there is no such run or checkpoint.
    """
    folder, text = None, None
    if names_table(str(given)) and (own := generated_registry(given)).exists():
        given = own
    if given.is_dir():
        folder = find_run(given, run)
    else:
        if given.name.isdigit() and runs_in(given.parent):
            find_run(given.parent, int(given.name))  # names the runs that exist
        registry = load_registry(given, plugins_dir=plugins_dir, settings=settings)
        runs = runs_folder(registry)
        if runs is None and run is not None:
            raise RecdError(
                f"{given}: --run needs training.checkpoint.runs, which is not set. Remove --run."
            )
        is_path = checkpoint not in (None, "newest", "best")
        if runs is not None and (run is not None or not is_path):
            folder = find_run(runs, run)
    if folder is not None:
        saved = read_settings(folder)
        settings = (*saved.settings, *settings)
        if plugins_dir is None and saved.plugins_dir is not None:
            plugins_dir = Path(saved.plugins_dir)
        if given.is_dir():
            given, text = Path(saved.registry), saved.text
        registry = load_registry(given, plugins_dir=plugins_dir, settings=settings, text=text)
        registry = in_folder(registry, folder)
    chosen = chosen_checkpoint(registry, checkpoint)
    return TrainedModel(registry, chosen, tuple(settings), plugins_dir)


def chosen_checkpoint(registry: RunConfig, wanted: str | None = None) -> Path:
    """Return the path of a run's checkpoint; print it if the best is chosen, but is not the newest.

    ``wanted`` is ``newest``, ``best``, the path of a checkpoint, or the path of a folder, whose
    newest checkpoint is used. None means the best checkpoint of a validated run, else the newest.
    """
    if wanted not in (None, "newest", "best"):
        path = Path(wanted)
        if (path / MANIFEST).exists():
            return path
        return _newest(path, "Pass a checkpoint, or a folder of checkpoints, to --checkpoint.")
    folder = registry.training.checkpoint.path
    if folder is None:
        raise RecdError(
            f"{registry.path}: training.checkpoint.path is not set, so recd run saves no model. "
            "Set the path and train again, or pass a checkpoint with --checkpoint."
        )
    newest = _newest(Path(folder), f"Train first: recd run {registry.path}")
    if wanted == "newest":
        return newest
    progress = read_progress(newest)
    curve = progress.validation
    if curve is None or curve.best_step is None:
        if wanted is None:
            return newest
        raise RecdError(
            f"{newest}: the run was not validated, so it has no best checkpoint. Use "
            "--checkpoint newest."
        )
    best = newest.with_name(step_name(curve.best_step))
    went_on = registry.training.validation is None and progress.step > curve.steps[-1]
    if wanted is None and (went_on or not best.exists()):
        return newest
    if not best.exists():
        raise RecdError(f"{best}: the best checkpoint was deleted. Use --checkpoint newest.")
    if wanted is None and best != newest and torchrun_rank() in (None, 0):
        click.echo(
            f"using the best checkpoint {best}; --checkpoint newest would use {newest.name}",
            err=True,
        )
    return best


def _newest(folder: Path, remedy: str) -> Path:
    if not (found := checkpoints_in(folder)):
        raise RecdError(f"{folder}: there is no checkpoint in this folder. {remedy}")
    return found[-1]
