"""Child processes of the trainer that communicate with Ray.

Ray kills its client process when a node is lost, and prints a lot. Child processes keep this away
from the trainer.
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

# Maximum number of lines of Ray's output in an error message.
_LAST_LINES = 4


class Helper:
    """A child process that runs a module until this process ends or closes the connection.

    Args:
        module: name of the module, run like ``python -m module``.
        token: authentication token of the Ray cluster; None if it needs none.
        environ: variables added to the environment of the child process.
    """

    def __init__(self, module: str, token: str | None = None, **environ: str) -> None:
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        environ = {
            **os.environ,
            **environ,
            # Pass on this process's path, so that plugins' imports work.
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
            start_new_session=True,  # only the trainer handles Ctrl-C
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Return the process id of the child process."""
        return self._process.pid

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. If the child process has ended, the next ``receive`` raises EOFError."""
        with suppress(OSError):
            self.connection.send((kind, fields))

    def receive(
        self, timeout: float | None = None, needed: Helper | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the next message of the child process, as its kind and a dict of values.

        Args:
            timeout: seconds to wait; None waits forever.
            needed: another child process without which this one cannot continue.

        Raises:
            TimeoutError: no message arrived in time.
            EOFError: this or the ``needed`` process has ended. Contains its last lines of output.
        """
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
        """Kill the child process and wait until it has ended. May be called twice."""
        self._process.kill()
        self.leave(patience=60.0)

    def children(self) -> list[psutil.Process]:
        """Return all descendants of the child process."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def leave(self, patience: float) -> bool:
        """Close the connection and wait for the child process to exit.

        Returns whether it exited within ``patience`` seconds.
        """
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
        ended = f"process {self._process.pid} ended with exit code {self._process.returncode}"
        return "\n".join([ended, *lines[-_LAST_LINES:]])


def serve() -> Connection:
    """Return the connection to the trainer, in a child process. Ignores SIGINT and SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # otherwise Ray's processes would keep it open
    return Connection(descriptor)


# Blocks that may be sent ahead. A connection alone would buffer a hundred of any size.
_BLOCKS_ON_THE_WAY = 2


class Sender:
    """Sends messages and blocks to the trainer, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._receiver = os.getppid()
        self._room = threading.Semaphore(_BLOCKS_ON_THE_WAY)

    def send(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._connection.send((kind, fields))

    def send_block(self, data: memoryview, **fields: Any) -> None:
        """Send a ``block`` message and an unnamed file with the bytes of the block.

        Waits until the trainer has received all blocks except two. The file is freed when both
        processes have closed it.
        """
        self._room.acquire()
        with open(os.memfd_create("recd-block"), "wb") as file:
            file.write(data)
            file.flush()
            with self._lock:
                self._connection.send(("block", {**fields, "size": data.nbytes}))
                send_handle(self._connection, file.fileno(), self._receiver)

    def taken(self) -> None:
        """Record that the trainer has received a block. Called for each ``taken`` message."""
        self._room.release()


def receive_block(connection: Connection, size: int) -> mmap.mmap:
    """Receive the unnamed file of a ``block`` message, as a memory map of ``size`` bytes."""
    file = recv_handle(connection)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)
