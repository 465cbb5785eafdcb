"""Between a trainer and the process that speaks to Ray for it: messages, and blocks in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

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
