"""A process that Ray's workers on this machine are forked from.

It has imported what a reader needs, which takes 4 s of a core and some hundred MB: a worker has it
at once, and shares the memory. Where it is not, as on other machines of a cluster or once it was
killed, a worker is an interpreter of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.util import Finalize

import psutil

from recd_plugins.api import WorkerContext

# What readers need but Ray, which notes at its import for which job a process works.
_IMPORTS = ("pandas", "recd_plugins.data.worker_imports", "recd_plugins.api")

_END_SECONDS = 10.0
# Command, folder, environment, and files for input and outputs.
_Request = tuple[list[str], str, dict[str, str], list[int]]


class WorkerServer:
    """The process; itself forked from the server of this process, where it has one.

    Attributes:
        address: where ``worker_start.py`` reaches it.
    """

    def __init__(self) -> None:
        self.address = arbitrary_address("AF_UNIX")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(socket.SOMAXCONN)
            self._process = WorkerContext().Process(target=_serve, args=(listener,))
            self._process.start()
        # Else this process would wait for it as it ends.
        Finalize(self, self._process.kill, exitpriority=0)

    def end(self) -> None:
        """End it, and workers that are there still, which write into Ray's folder until they end.

        A second call does nothing.
        """
        workers: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.join()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        psutil.wait_procs(workers, timeout=_END_SECONDS)


def _serve(listener: socket.socket) -> None:
    """Fork workers until killed; in a worker, be it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module in _IMPORTS:
        importlib.import_module(module)
    request = None
    while request is None:
        with suppress(OSError, ValueError), listener.accept()[0] as client:
            request = _forked(client)
    listener.close()
    _work(*request)


def _forked(client: socket.socket) -> _Request | None:
    """What was asked for, in the worker; None in the server."""
    size, files, *_ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as file:
        command, folder, environ = json.loads(file.read(int.from_bytes(size, "little")))
    if os.fork() == 0:
        return command, folder, environ, files
    for each in files:
        os.close(each)
    client.sendall(b"1")
    return None


def _work(command: list[str], folder: str, environ: dict[str, str], files: list[int]) -> None:
    """Run a module as an interpreter does that is started with the command."""
    os.setpgid(0, 0)  # Ray kills a worker by its group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__")
