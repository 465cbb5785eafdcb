"""Processes that may use so much memory and no more, page cache included: a memory cgroup."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recd_plugins.api import RecdError, SetupError

T = TypeVar("T")

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_V1_LIMIT = "memory.limit_in_bytes"


class NoMemoryLimitError(SetupError):
    """No memory cgroup can be made here."""


@dataclass(frozen=True)
class MemoryLimit:
    """A memory cgroup without a limit as yet.

    Attributes:
        folder: of it.
        limit: name of the file there that says how much its processes may use together.
        num_bytes: how much that will be.
    """

    folder: Path
    limit: str
    num_bytes: int

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a module's function in a new process that is in the cgroup from its start.

        Raises:
            RecdError: it failed; says its last lines, or that the limit ended it.
        """
        (self.folder / self.limit).write_text("-1" if self.limit == _V1_LIMIT else "max")
        with tempfile.TemporaryDirectory() as folder:
            call, result = Path(folder) / "call", Path(folder) / "result"
            call.write_bytes(pickle.dumps((function, arguments)))
            ended = subprocess.run(
                [sys.executable, "-P", "-c", _CHILD, str(self.folder), str(call), str(result)],
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            if ended.returncode == -signal.SIGKILL:
                raise RecdError(
                    f"a process limited to {self.num_bytes / 2**20:.0f} MiB was killed: they are "
                    "too few for it"
                )
            if ended.returncode:
                raise RecdError(
                    "a process in a memory cgroup failed: "
                    + "\n".join(ended.stderr.splitlines()[-8:])
                )
            found: T = pickle.loads(result.read_bytes())
            return found

    def set(self) -> None:
        """Set the limit from now on; called by a process in the cgroup that made its tables.

        What it wrote goes to the disk first: version 1 ends a process that has too many pages
        which only wait for that.

        Raises:
            RecdError: more than that is used already.
        """
        os.sync()
        for _ in range(_TRIES):
            with suppress(OSError):
                (self.folder / self.limit).write_text(str(self.num_bytes))
                return
            time.sleep(0.1)
        raise RecdError(
            f"a process that is to be limited to {self.num_bytes / 2**20:.0f} MiB uses more before "
            "it begins to train: they are too few for it"
        )


# Joins the cgroup before anything large is imported, so that it is counted.
_CHILD = """
import os, pathlib, pickle, sys
group, call, result = map(pathlib.Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))
function, arguments = pickle.loads(call.read_bytes())
result.write_bytes(pickle.dumps(function(*arguments)))
"""
_TRIES = 20


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[MemoryLimit]:
    """A memory cgroup of either version, gone at the end.

    Raises:
        NoMemoryLimitError: none can be made here; says why.
    """
    name = f"recd-bench-{os.getpid()}"
    if (_V1 / _V1_LIMIT).exists():
        limit = MemoryLimit(_V1 / name, _V1_LIMIT, num_bytes)
    elif (_V2 / "cgroup.controllers").exists():
        limit = MemoryLimit(_V2 / name, "memory.max", num_bytes)
    else:
        raise NoMemoryLimitError(f"this machine has no memory cgroups at {_V2}")
    try:
        limit.folder.mkdir()
    except OSError as error:
        raise NoMemoryLimitError(f"{limit.folder}: {error.strerror}; root can make it") from error
    try:
        _without_swap(limit)
        yield limit
    finally:
        with suppress(OSError):
            limit.folder.rmdir()


def _without_swap(limit: MemoryLimit) -> None:
    """See whether the limit can be set, and keep the group off the swap."""
    off = {"memory.swappiness": "0", "memory.swap.max": "0"}
    if not (limit.folder / limit.limit).exists():
        raise NoMemoryLimitError(
            f"{limit.folder}: has no {limit.limit}; the memory controller is not on here"
        )
    for name, value in off.items():
        if (limit.folder / name).exists():
            with suppress(OSError):
                (limit.folder / name).write_text(value)
