"""Locks on files that end with the process that holds them, and say who that is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from recd_plugins.runtime.errors import RecdError

#: In a folder that one process at a time may write.
LOCK = "recd.lock"

# A child that this process forks would keep them, and outlive it.
_handles: set[int] = set()


def try_lock(handle: int) -> bool:
    """Lock an open file for this process alone; False on a file system that has no locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(*error.args) from error
        return False
    return True


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """A context in which no other process writes ``folder``; yields whether locks work there.

    The folder is made where it is missing. The lock is on a file in it, which names this process.
    It is gone when this process is, however it ends, and children do not inherit it.

    Raises:
        RecdError: another process holds it; says which one, where and since when.
        OSError: the folder cannot be written.
    """
    path = folder / LOCK
    folder.mkdir(parents=True, exist_ok=True)
    handle, works = _open_locked(path)
    _handles.add(handle)
    try:
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        }
        with suppress(OSError):  # on a full disk it holds without a name
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(owner).encode())
        yield works
    finally:
        with suppress(OSError):
            path.unlink()
        _handles.discard(handle)
        os.close(handle)


def _open_locked(path: Path) -> tuple[int, bool]:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            works = try_lock(handle)
            # Who held it removes the file at its end; then this is no longer the one of that name.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.lstat()):
                    return handle, works
        except BlockingIOError as error:
            owner = _owner(handle)
            os.close(handle)
            raise RecdError(
                f"{path.parent}: {owner} is writing there; wait until it has ended, or end it"
            ) from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _owner(handle: int) -> str:
    try:
        owner = json.loads(os.pread(handle, 1000, 0))
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    except (ValueError, KeyError, TypeError):  # it is only about to say it
        return "another process"


def _forget() -> None:
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_forget)
