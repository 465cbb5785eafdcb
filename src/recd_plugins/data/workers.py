"""Reader workers: processes that read, convert and preprocess for one rank.

torchdata's StatefulDataLoader runs them and returns their blocks in order. It knows no position:
that is the reader's alone, and each batch carries it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from multiprocessing import Pipe
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from queue import Empty
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from recd_plugins.data.ipc import Packed, pack, unpack
from recd_plugins.interfaces import Feed, Reader
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.ingestion import BatchBlock, ReadTask, State
from recd_plugins.report.output import show_controls
from recd_plugins.runtime.activity import doing
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.processes import (
    adopt_environ,
    end_with_parent,
    portable,
    safe_path,
    start_fork_server,
)

# A worker's connections break a moment before the operating system reports its death.
_GRACE_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.1

_REMEDIES = {
    "SIGKILL": ". Where nobody killed it, the machine ran out of memory: use fewer workers, or "
    "smaller batches or row groups",
    "SIGBUS": ". It ran out of shared memory: enlarge /dev/shm (docker run --shm-size), or use "
    "fewer workers or smaller batches",
}


class Workers(Feed):
    """Processes that share the batches of one rank.

    Args:
        task: of the rank.
        num_workers: how many.
        pin_memory: pin batches, in a thread that takes them from the processes.
    """

    def __init__(self, task: ReadTask, num_workers: int, pin_memory: bool) -> None:
        self._task = task
        self._num_workers = num_workers
        self._pin_memory = pin_memory

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """Yield the batches from the position of ``reader``, which moves along, to the epoch's end.

        When a worker dies, all are started anew at the first batch that was not handed out, and
        stderr says so.
        """
        deaths = 0
        while True:
            try:
                with closing(self._blocks(reader.state_dict())) as blocks:
                    for model_input in hand_out(blocks, reader):
                        deaths = 0
                        yield model_input
                    return
            except WorkerDied as died:
                deaths += 1
                what = f"reader worker {died.worker} of rank {self._task.rank} {died.how}"
                if deaths == 3:
                    raise SetupError(
                        f"{what}, the third death without a batch in between{died.remedy}. With "
                        "training.workers: 0 the rank reads by itself"
                    ) from None
                print(f"{what}; new workers read on{died.remedy}", file=sys.stderr)

    def _blocks(self, position: State) -> Generator[BatchBlock, None, None]:
        """Yield the workers' blocks from ``position`` on, in order."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        context = WorkerContext()
        loader = packed = None
        try:
            with _quiet():
                loader = StatefulDataLoader(
                    _Share(self._task, position),
                    batch_size=None,
                    num_workers=self._num_workers,
                    # Blocks that a worker is ahead.
                    prefetch_factor=1,
                    pin_memory=self._pin_memory,
                    multiprocessing_context=context,
                    # Positions are the reader's.
                    snapshot_every_n_steps=None,
                    # Workers take their seeds from it: a model draws the same with and without.
                    generator=torch.Generator(),
                )
                packed = iter(loader)
            for number in count():
                # Workers take turns with blocks.
                awaited = context.process(number % self._num_workers)
                with doing("reading data", processes=awaited):
                    block = next(packed, None)
                if block is None:
                    return
                start = time.perf_counter()
                unpacked: BatchBlock = unpack(block)
                yield unpacked.moved(block.seconds, time.perf_counter() - start)
        except (RuntimeError, OSError, EOFError) as error:
            context.raise_death(error)
            raise
        finally:
            # The last references: torchdata ends the workers.
            del loader, packed
            context.end()


class _Share(IterableDataset[Packed]):
    """The blocks of one worker, packed."""

    def __init__(self, task: ReadTask, position: State) -> None:
        self._task = task
        self._position = position

    def __iter__(self) -> Iterator[Packed]:
        from recd_plugins.runtime.imports import silence_upstream

        silence_upstream()
        info = get_worker_info()
        assert info is not None, "only workers iterate over it"
        try:
            reader = self._task.open()
            for block in reader.blocks(self._position, info.id, info.num_workers):
                yield pack(block)
        except Exception as error:
            yield pack(BatchBlock(info.id, [], portable(error)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings about torchdata's own code, and about more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


class WorkerContext(ForkServerContext):
    """A context of multiprocessing for torch's data loaders, which knows its processes.

    A killed worker is noticed and none is left behind. Workers are forked from a server that has
    imported their modules, not from the trainer: its threads may hold locks, its sockets would stay
    open in them, and each page of a table that it writes would be copied first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(
            ["recd_plugins.runtime.fork_server", "recd_plugins.data.worker_imports"]
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
        """Return the process id of a worker by its name; none before it has started."""
        started = self._processes[number : number + 1]
        return {f"reader worker {number}": each.pid for each in started if each.pid is not None}

    def dead(self) -> tuple[int, ForkServerProcess] | None:
        """Return number and process of a worker that died."""
        return next(((n, p) for n, p in enumerate(self._processes) if p.exitcode), None)

    def raise_death(self, cause: Exception) -> None:
        """Raise ``WorkerDied`` if the death of a worker is behind ``cause``."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (dead := self.dead()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if dead is not None:
            raise WorkerDied(*dead) from cause

    def end(self) -> None:
        """Kill the workers that are left."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()


def start_server() -> None:
    """Start the server that workers are forked from, which imports in the background.

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
            with safe_path():
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
        remedy: advice, a sentence or nothing.
    """

    def __init__(self, worker: int, process: ForkServerProcess) -> None:
        code = process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else ""
        how = f"was killed by {name}" if name else f"ended with exit code {code}"
        self.worker = worker
        self.how = f"(process {process.pid}) {how}"
        self.remedy = _REMEDIES.get(name, "")
        super().__init__(self.how)


def hand_out(blocks: Iterable[BatchBlock], reader: Reader) -> Iterator[ModelInput]:
    """Yield the batches of blocks; ``reader`` moves along as if it had read them."""
    for block in blocks:
        for model_input, position in block.batches:
            reader.load_state_dict(position)
            yield model_input
        if isinstance(block.end, Exception):
            raise block.end
        if block.end is not None:
            reader.load_state_dict(block.end)
            return
