"""Processes that speak to Ray in place of a trainer, and the channel to them.

Ray ends a process that uses it when its node is lost, and writes much of its own. In a process
apart neither reaches the trainer, and none of Ray's threads takes its time.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import psutil

# Of what Ray wrote: lines that an error message shows.
_LAST_LINES = 4


class Helper:
    """A module run as a process; it ends when its connection does, as when this process dies.

    Args:
        module: whose ``main`` runs.
        token: of a Ray cluster that lets in who has it; None where there is none, or the
            environment says it.
        environ: of the process, besides that of this one.
    """

    def __init__(self, module: str, token: str | None = None, **environ: str) -> None:
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        environ = {
            **os.environ,
            **environ,
            # What plugins import is on the path of this process.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        }
        if token is not None:
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is the trainer's
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, kind: str, **fields: Any) -> None:
        """A message; lost where the process has ended, which ``receive`` notices."""
        with suppress(OSError):
            self.connection.send((kind, fields))

    def receive(
        self, timeout: float | None = None, needed: Helper | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The next message."""
        sources = [each.connection for each in (self, needed) if each is not None]
        ready = wait(sources, timeout)
        if not ready:
            raise TimeoutError
        if needed is not None and self.connection not in ready:
            raise EOFError(needed._last_words())
        try:
            kind, fields = self.connection.recv()
        except (EOFError, ConnectionError):
            raise EOFError(self._last_words()) from None
        return kind, fields

    def end(self) -> None:
        """End the process. A second call does nothing."""
        self._process.kill()
        self.leave(patience=60.0)

    def children(self) -> list[psutil.Process]:
        """The processes that it has started, and those that these have."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def leave(self, patience: float) -> bool:
        """Let the process end by itself; wait some seconds for it. Whether it did."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._log.close()
        return self._process.returncode is not None

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        written = self._log.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in written if "\tINFO " not in line]
        ended = f"Process {self._process.pid} ended with exit code {self._process.returncode}"
        return "\n".join([ended, *lines[-_LAST_LINES:]])


def serve() -> Connection:
    """The connection of the process, for code that runs in it; signals are the trainer's."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # or Ray's processes would keep it open
    return Connection(descriptor)


# Blocks that are sent and not yet taken. A connection itself holds a hundred, whatever their size.
_BLOCKS_ON_THE_WAY = 2


class Sender:
    """The end that blocks are sent from; any thread may send.

    For each block that the other end takes, ``taken`` has to be called here.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._receiver = os.getppid()
        self._room = threading.Semaphore(_BLOCKS_ON_THE_WAY)

    def send(self, kind: str, **fields: Any) -> None:
        """One message."""
        with self._lock:
            self._connection.send((kind, fields))

    def send_block(self, data: memoryview, **fields: Any) -> None:
        """One message ``block``, and bytes in a file without a name.

        Waits while the other end takes none. What is in flight goes with the processes, however
        they end.
        """
        self._room.acquire()
        file = _anonymous_file()
        try:
            size = _write(file, data)
            with self._lock:
                self._connection.send(("block", {**fields, "size": size}))
                send_handle(self._connection, file, self._receiver)
        finally:
            os.close(file)

    def taken(self) -> None:
        """The other end has taken a block."""
        self._room.release()


def receive_block(connection: Connection, size: int) -> mmap.mmap:
    """The bytes after a message ``block``, mapped, not copied."""
    file = recv_handle(connection)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("recd-block")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, data: memoryview) -> int:
    written = 0
    while written < data.nbytes:
        written += os.write(file, data[written:])
    return written
