"""Locks folders, and builds output tables in hidden folders before they replace the target."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recd_plugins.runtime.errors import DataError, RecdError
from recd_plugins.runtime.files import read_note, write_note

#: Name of the lock file in a folder.
LOCK = "recd.lock"
_IDENTITY, _OLD = "run.json", "old"

# Forked children close these files: otherwise they would hold the locks after this process ends.
_handles: set[int] = set()


def try_lock(handle: int) -> bool:
    """Lock an open file. Return False if the file system does not support locks.

    Raises:
        BlockingIOError: another process has locked the file.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(*error.args) from error
        return False
    return True


@contextmanager
def locked_folder(folder: Path, waits: Callable[[], None] | None = None) -> Iterator[bool]:
    """Create ``folder`` if needed and lock it. Yield whether the file system supports locks.

    The lock is released when this process ends, even if it is killed. Child processes do not
    inherit the lock. If another process has the lock, ``waits`` is called before waiting for it.

    Raises:
        RecdError: another process has locked the folder, and ``waits`` is None. The message names
            the process.
        OSError: the folder cannot be written.
    """
    path = folder / LOCK
    handle, works = _open_locked(path, waits)
    _handles.add(handle)
    try:
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        }
        with suppress(OSError):  # on a full disk, the lock works without a name
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(owner).encode())
        yield works
    finally:
        if _is_at(handle, path):
            path.unlink()
        _handles.discard(handle)
        os.close(handle)


def _open_locked(path: Path, waits: Callable[[], None] | None) -> tuple[int, bool]:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # another process has just removed the folder, at its end
            continue
        try:
            try:
                works = try_lock(handle)
            except BlockingIOError as error:
                if waits is None:
                    raise RecdError(
                        f"{path.parent}: {_owner(handle)} is writing to this folder. Wait until "
                        "the process has ended, or stop the process."
                    ) from error
                waits()
                fcntl.flock(handle, fcntl.LOCK_EX)
                works = True
            # The previous holder removes its lock file when it ends: check that this is not it.
            if _is_at(handle, path):
                return handle, works
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), path.lstat())
    return False


def _owner(handle: int) -> str:
    try:
        owner = json.loads(os.pread(handle, 1000, 0))
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"


def _forget() -> None:
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_forget)


class WorkFolder:
    """Hidden folder in which a command builds its output table.

    Attributes:
        table: subfolder for the table, which replaces the target at the end.
        resumed: whether the folder contains unfinished work of an earlier run.
        is_whole: whether the table is complete.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        self.table = path / "table"
        self.resumed = resumed
        self.is_whole = False

    def publish(self, target: Path) -> None:
        """Replace ``target`` with the finished table. If DataError is raised, the table is kept."""
        self.is_whole = True
        try:
            put(self.table, target, self.path)
        except DataError as error:
            message = f"{error} The finished table is in {self.table}."
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
    """Create the hidden folder ``.NAME.PURPOSE`` next to ``target``, or reuse an existing one.

    A folder is reused if a killed run with the same ``identity``, a dict of JSON values, has left
    it. The folder is removed at the end, but stays if the process is killed or the target cannot be
    replaced. ``say`` is called with a message about whether the run resumes. If another process
    uses the folder, ``waits`` is called before waiting for it.

    Raises:
        DataError: ``target`` cannot be written or is a mount point.
        RecdError: another process uses the folder, and ``waits`` is None.
    """
    place = Path(os.path.realpath(target))
    if os.path.ismount(place):
        raise DataError(
            f"{target}: the path is a mount point, which cannot be replaced. Use a new folder "
            "inside this mount point."
        )
    path = place.with_name(f".{place.name}.{purpose}")
    try:
        with locked_folder(path, waits):
            _put_back(place, path)
            work = WorkFolder(path, _take_over(path, identity, say))
            try:
                yield work
            except RecdError:
                if not work.is_whole:
                    shutil.rmtree(path, ignore_errors=True)
                raise
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{target}: the output cannot be written ({error.strerror or error}). Use another path."
        ) from error


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to ``folder``, and remove it at the end.

    Raises the same errors as ``work_folder``.
    """
    identity = {"token": secrets.token_hex(8)}
    with work_folder(folder, "new", identity, lambda _: None) as work:
        try:
            yield work.path
        finally:
            shutil.rmtree(work.path, ignore_errors=True)


def machine_start() -> str:
    """Return an id that changes at each boot of the machine; empty if the OS has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def put(new: Path, target: Path, scratch: Path) -> None:
    """Rename ``new`` to ``target``, and replace an existing file or folder.

    Follows symbolic links. ``scratch`` stores a replaced folder until the end. If ``target`` cannot
    be replaced, raises DataError and leaves it unchanged.
    """
    old, target = scratch / _OLD, Path(os.path.realpath(target))
    try:
        if target.is_dir():
            target.rename(old)
        try:
            os.replace(new, target)
        except BaseException:
            _put_back(target, scratch)
            raise
    except OSError as error:
        raise DataError(
            f"{target}: the output cannot be replaced ({error.strerror}). Use another path."
        ) from error


def _put_back(target: Path, scratch: Path) -> None:
    """Restore the previous ``target`` after a ``put`` that failed or was killed."""
    old = scratch / _OLD
    if old.exists() and not target.exists():
        old.rename(target)


def _take_over(path: Path, identity: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Return whether the folder has work with this identity to resume; else empty the folder."""
    found = read_note(path / _IDENTITY)
    if found == json.loads(json.dumps(identity)):
        say("resuming an interrupted run")
        return True
    if found is not None:
        differing = sorted(key for key in identity if found.get(key) != identity[key])
        say(f"starting again: {', '.join(differing)} changed since the interrupted run")
    for left in path.iterdir():
        if left.name != LOCK:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    write_note(path / _IDENTITY, identity)
    return False
