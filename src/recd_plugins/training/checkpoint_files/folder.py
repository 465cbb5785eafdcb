"""Names in a folder of checkpoints, and how they come and go."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

import click

from recd_plugins.errors import RecdError

_NAME = re.compile(r"step-\d{9}")
# What a killed process leaves: a checkpoint not yet whole, one half deleted, and a whole one that
# another of its step was to replace.
_LEFTOVER = re.compile(r"\.(?P<step>step-\d{9})(\.[0-9a-f]{8})?\.(partial|old|(?P<whole>before))")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the oldest first; none where there is no folder."""
    try:
        names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(path for path in names if path.is_dir())


def check_newest(checkpoint: Path) -> None:
    """Refuse to write one of an earlier step than the newest, which a run would go on from.

    Raises:
        RecdError: names both.
    """
    newest = max((path.name for path in checkpoints_in(checkpoint.parent)), default="")
    if checkpoint.name < newest:
        raise RecdError(
            f"{checkpoint}: would be of an earlier step than {newest}, which is there and would be "
            "gone on from: count steps on from what load returned, as BatchSource(loader, "
            "progress) does, or set another folder"
        )


def partial_of(checkpoint: Path) -> Path:
    """Where it is written: a new name, which ranks of a killed run that still write do not know."""
    return checkpoint.with_name(f".{checkpoint.name}.{secrets.token_hex(4)}.partial")


def clean(folder: Path) -> None:
    """Remove what earlier runs left, or say that it stays; a whole checkpoint gets its name back.

    Raises:
        RecdError: it is nothing that a run makes.
    """
    for path in folder.iterdir():
        if not (found := _LEFTOVER.fullmatch(path.name)):
            continue
        if path.is_symlink() or not path.is_dir():
            raise RecdError(
                f"{path}: is no folder, and no run makes such a thing; remove it, or set "
                "training.checkpoint.path to another folder"
            )
        checkpoint = path.with_name(found["step"])
        if found["whole"] and not checkpoint.exists():
            os.replace(path, checkpoint)
        else:
            _remove(path)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged one, so that nothing takes it for a checkpoint.

    Raises:
        RecdError: it cannot be renamed.
    """
    number = 1
    while (aside := checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")).exists():
        number += 1
    try:
        os.replace(checkpoint, aside)
    except OSError as error:
        raise RecdError(
            f"{checkpoint}: is damaged and cannot be renamed ({error.strerror or error}); move it "
            "away to go on from the one before"
        ) from error
    return aside


def delete(checkpoint: Path) -> None:
    """Remove one, under another name from the first moment.

    What stays of it then, which is said, ``clean`` removes.

    Raises:
        OSError: it keeps its name.
    """
    if dying := _without_name(checkpoint, ".old"):
        _remove(dying)


def put(partial: Path, checkpoint: Path) -> None:
    """Give what was written its name. One that has it already is removed after that.

    Where the process is killed in between, ``clean`` gives that one its name back.

    Raises:
        OSError: it does not get it, and the other one keeps it.
    """
    before = _without_name(checkpoint, ".before") if checkpoint.exists() else None
    try:
        os.replace(partial, checkpoint)
    except OSError:
        if before:
            os.replace(before, checkpoint)
        raise
    sync(checkpoint.parent)
    if before:
        dying = before.with_suffix(".old")
        os.replace(before, dying)
        _remove(dying)


def _without_name(checkpoint: Path, suffix: str) -> Path | None:
    """What is left of one that is to go, under another name; None where that is nothing."""
    if checkpoint.is_symlink():  # somebody put it there; what it leads to is theirs
        checkpoint.unlink()
        return None
    hidden = checkpoint.with_name(f".{checkpoint.name}.{secrets.token_hex(4)}{suffix}")
    os.replace(checkpoint, hidden)
    return hidden


def _remove(path: Path) -> None:
    """Remove what is no checkpoint any more; on NFS what a process has open stays for a while."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        click.echo(
            f"{path}: cannot be removed ({error.strerror or error}); the next run that writes here "
            "tries it again",
            err=True,
        )


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
