"""Between a trainer and the process that speaks to Ray for it: messages, and blocks in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any


class Sender:
    """The end that blocks are sent from; any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._receiver = os.getppid()

    def send(self, kind: str, **fields: Any) -> None:
        """One message; waits while the other end takes none."""
        with self._lock:
            self._connection.send((kind, fields))

    def send_block(self, data: memoryview, **fields: Any) -> None:
        """One message ``block``, and bytes in a file without a name.

        What is in flight goes with the processes, however they end.
        """
        file = _anonymous_file()
        try:
            size = _write(file, data)
            with self._lock:
                self._connection.send(("block", {**fields, "size": size}))
                send_handle(self._connection, file, self._receiver)
        finally:
            os.close(file)


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
