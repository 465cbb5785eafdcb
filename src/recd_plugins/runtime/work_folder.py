"""The hidden folder of a run beside its target, which outlives a killed run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recd_plugins.runtime.errors import DataError, RecdError
from recd_plugins.runtime.file_lock import try_lock
from recd_plugins.runtime.files import read_note, write_note
from recd_plugins.runtime.scratch_folder import place_of, put, put_back

_LOCK, _IDENTITY = "lock", "run.json"


class WorkFolder:
    """Where a run builds its table.

    Attributes:
        path: the folder.
        table: what becomes the target.
        resumed: whether another run's work is in it.
        is_whole: whether the table is, and waits for its place alone.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        self.table = path / "table"
        self.resumed = resumed
        self.is_whole = False

    def publish(self, target: Path) -> None:
        """Put the table in its place; what stood there is removed after that.

        Raises:
            DataError: the place cannot be written; the table stays where it is.
        """
        self.is_whole = True
        try:
            put(self.table, target, self.path)
        except DataError as error:
            message = f"{error}; what was made for it is whole, and stays in {self.table}"
            raise DataError(message) from error


@contextmanager
def work_folder(
    target: Path,
    purpose: str,
    identity: dict[str, Any],
    say: Callable[[str], None],
    *,
    waits: Callable[[], None] | None = None,
) -> Iterator[WorkFolder]:
    """The folder ``.NAME.PURPOSE`` beside ``target``, or what that is a link to, for this process
    alone.

    What an earlier run with the same identity left in it stays. It is removed at the end and when
    the input is wrong, but not when the process is killed or interrupted, nor where the target
    cannot be put in its place.

    Args:
        target: what the run makes.
        purpose: of the run.
        identity: JSON values, by name; a run with others starts anew.
        say: told, in words, how the run begins.
        waits: called where another process is at work in it, before that is waited for; it may
            have made the target then. Without it this is an error.

    Raises:
        DataError: the place cannot be written or is a mount point, or another process is at work
            in it.
    """
    place = place_of(target)
    path = place.with_name(f".{place.name}.{purpose}")
    try:
        with _locked(path, waits):
            put_back(place, path)
            resumed = _take_over(path, identity, say)
            work = WorkFolder(path, resumed)
            try:
                yield work
            except RecdError:
                if not work.is_whole:
                    shutil.rmtree(path, ignore_errors=True)
                raise
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from error


def machine_start() -> str:
    """Tells one start of this machine from the next: what was not synced may be lost between."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _take_over(path: Path, identity: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Whether there is work to go on from; work of another run is removed."""
    found = read_note(path / _IDENTITY)
    if found == json.loads(json.dumps(identity)):
        say("going on from a run that broke off")
        return True
    if found is not None:
        differing = sorted(key for key in identity if found.get(key) != identity[key])
        say(f"starting anew: {', '.join(differing)} changed since a run broke off")
    for left in path.iterdir():
        if left.name != _LOCK:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    write_note(path / _IDENTITY, identity)
    return False


@contextmanager
def _locked(path: Path, waits: Callable[[], None] | None) -> Iterator[None]:
    """A context in which no other process is in the folder."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            opened = (path / _LOCK).open("ab")
        except FileNotFoundError:  # another process has just removed the folder, at its end
            continue
        with opened as lock:
            try:
                try_lock(lock.fileno())
            except BlockingIOError as error:
                if waits is None:
                    raise DataError(
                        f"{path}: another process is at work for this target"
                    ) from error
                waits()
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_nlink:
                yield
                return
