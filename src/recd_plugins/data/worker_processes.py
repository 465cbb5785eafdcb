"""Processes and what connects them, such that a killed worker is noticed and none is left behind.

torch's data loaders take these from a context of multiprocessing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import Pipe
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from queue import Empty
from types import ModuleType
from typing import Any

from recd_plugins.processes import adopt_environ, end_with_parent, start_fork_server, starting
from recd_plugins.visible_text import show_controls

# A worker's connections break a moment before the operating system reports its death.
_GRACE_SECONDS = 2.0

_SECONDS_BETWEEN_LOOKS = 0.1

_REMEDIES = {
    "SIGKILL": ". Where nobody killed it, the machine ran out of memory: use fewer workers, or "
    "smaller batches or row groups",
    "SIGBUS": ". It ran out of shared memory: enlarge /dev/shm (docker run --shm-size), or use "
    "fewer workers or smaller batches",
}


class WorkerContext(ForkServerContext):
    """A context of multiprocessing with what torchdata needs to run workers; keeps the processes.

    Workers are forked from a server that has imported what they need, not from the trainer: its
    threads may hold locks, its sockets would stay open in them, and each page of a table that it
    writes would be copied first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(
            ["recd_plugins.fork_server", "recd_plugins.data.worker_imports"]
        )
        self._processes: list[ForkServerProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> ForkServerProcess:  # type: ignore[override]
        self._processes.append(_Process(*args, **kwargs))
        return self._processes[-1]

    def Queue(self, maxsize: int = 0) -> Any:
        return _Queue(maxsize, self)

    def Event(self) -> Any:
        return _Flag()

    def Lock(self) -> Any:
        return _Lock()

    def BoundedSemaphore(self, value: int = 1) -> Any:  # noqa: ARG002
        return _NoSemaphore()

    def process(self, number: int) -> dict[str, int]:
        """Process id of a worker by its name; none before it has started."""
        started = self._processes[number : number + 1]
        return {f"reader worker {number}": each.pid for each in started if each.pid is not None}

    def dead(self) -> tuple[int, ForkServerProcess] | None:
        """Number and process of a worker that died."""
        return next(((n, p) for n, p in enumerate(self._processes) if p.exitcode), None)

    def raise_death(self, cause: Exception) -> None:
        """Raise ``WorkerDied`` where ``cause`` comes of the death of a worker."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (dead := self.dead()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if dead is not None:
            raise WorkerDied(*dead) from cause

    def end(self) -> None:
        """End what is still there."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()


def start_server() -> None:
    """Start what workers are forked from, which imports while this process does something else.

    The first worker starts it where this was not called.
    """
    WorkerContext()
    start_fork_server()


class _Process(ForkServerProcess):
    """A worker that leaves signals to the trainer and ends with it."""

    def start(self) -> None:
        self._environ, self._folder = dict(os.environ), Path.cwd()
        # Else multiprocessing would run the trainer's script in the worker, to its first line under
        # `if __name__ == "__main__"`, which many have not.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            with starting("reader workers"):
                super().start()
        finally:
            sys.modules["__main__"] = main

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        end_with_parent()
        # The server has those of its own start.
        adopt_environ(self._environ)
        os.chdir(self._folder)
        for stream in (sys.stdout, sys.stderr):
            show_controls(stream)
        super().run()


class _Flag:
    """An event without a lock, which a worker that is killed could take along."""

    def __init__(self) -> None:
        self._value = RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)


class _Lock:
    """A lock that ends with the processes that know it: a byte in a pipe, which one of them takes.

    Semaphores have names, which a process that is killed leaves behind.
    """

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        self.release()

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if not self._reader.poll(timeout if block else 0):
            return False
        os.read(self._reader.fileno(), 1)
        return True

    def release(self) -> None:
        os.write(self._writer.fileno(), b".")

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _NoSemaphore:
    """Bounds the length of queues that have no bound."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:  # noqa: ARG002
        return True

    def release(self) -> None:
        pass


class _Queue(Queue):  # type: ignore[type-arg]
    """A queue that is empty at once, not after torch's five seconds, when a worker is dead."""

    _context: WorkerContext | None = None

    def __init__(self, maxsize: int, context: WorkerContext) -> None:
        super().__init__(maxsize, ctx=context)
        self._context = context

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self._context is None or timeout is None:  # in a worker it is None
            return super().get(block, timeout)
        deadline = time.monotonic() + timeout
        while True:
            try:
                return super().get(block, _SECONDS_BETWEEN_LOOKS)
            except Empty:
                if self._context.dead() or time.monotonic() > deadline:
                    raise


class WorkerDied(Exception):
    """A worker did.

    Attributes:
        worker: its number.
        how: process and signal or exit code.
        remedy: what to do, a sentence or nothing.
    """

    def __init__(self, worker: int, process: ForkServerProcess) -> None:
        code = process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else ""
        how = f"was killed by {name}" if name else f"ended with exit code {code}"
        self.worker = worker
        self.how = f"(process {process.pid}) {how}"
        self.remedy = _REMEDIES.get(name, "")
        super().__init__(self.how)
