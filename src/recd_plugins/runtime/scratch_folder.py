"""A hidden folder to write in, beside the place where its content will stand."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recd_plugins.runtime.errors import DataError

# Held by the process that writes; its name tells these folders from a user's hidden ones.
_LOCK = "recd.lock"
# What is being replaced.
_OLD = "old"


def place_of(target: Path) -> Path:
    """What ``target`` is, or is a link to: what is written beside that can be moved there.

    Raises:
        DataError: it is a mount point, to which nothing can be moved.
    """
    place = Path(os.path.realpath(target))
    if os.path.ismount(place):
        raise DataError(
            f"{target}: is a mount point, which cannot be replaced as a whole; name a new folder "
            "inside it"
        )
    return place


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A new folder ``.NAME.*`` beside ``folder``, or what that is a link to, which is removed at
    the end with what is in it then.

    Those that killed processes left behind are removed first, and a folder that one was replacing
    is put back. On file systems without locks they stay.

    Raises:
        DataError: the place cannot be written, or is a mount point.
    """
    place = place_of(folder)
    prefix = f".{place.name}."
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for found in place.parent.iterdir():
            if found.name.startswith(prefix):
                _remove_unless_locked(found, place)
        hidden = Path(tempfile.mkdtemp(dir=place.parent, prefix=prefix))
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        with (hidden / "new").open("xb") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Under its name only now: no other process finds it unlocked.
            (hidden / "new").rename(hidden / _LOCK)
            yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def put(new: Path, target: Path, scratch: Path) -> None:
    """Move ``new`` to ``target``, or to what that is a link to. A folder there waits in
    ``scratch``, in case that this fails.

    Raises:
        DataError: it failed; ``target`` is as it was.
    """
    old, target = scratch / _OLD, Path(os.path.realpath(target))
    try:
        if target.is_dir():
            target.rename(old)
        try:
            os.replace(new, target)
        except BaseException:
            put_back(target, scratch)
            raise
    except OSError as error:
        raise DataError(f"{target}: cannot be replaced ({error.strerror})") from error


def put_back(target: Path, scratch: Path) -> None:
    """Undo what ``put`` did before it failed or its process was killed."""
    old = scratch / _OLD
    if old.exists() and not target.exists():
        old.rename(target)


def _remove_unless_locked(hidden: Path, folder: Path) -> None:
    with suppress(OSError), (hidden / _LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        put_back(folder, hidden)
        shutil.rmtree(hidden)
