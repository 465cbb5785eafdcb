"""Reader workers: processes that read, convert and preprocess for one rank.

With n workers, each worker produces every n-th block of batches and prefetches one block.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType

import torch

from recd_plugins.data.ipc import decode_file, encode_to_file
from recd_plugins.data.reader import prefetch
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

_REMEDY = (
    ". The machine probably ran out of memory. Lower training.workers or training.batch_size, or "
    "write smaller row groups"
)


class Workers(Feed):
    """Reader processes that produce the batches of one rank.

    With ``pin_memory``, a thread of the training process copies batches to pinned memory.
    """

    def __init__(self, task: ReadTask, num_workers: int, pin_memory: bool) -> None:
        self._task = task
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._pids: list[int] = []

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """Yield batches from the position of ``reader`` on. Restarts all workers if one dies."""
        deaths = 0
        while True:
            position = reader.state_dict()
            ahead = self._num_workers if self._pin_memory else 0
            try:
                with closing(prefetch(partial(self._blocks, position), ahead)) as blocks:
                    for model_input in hand_out(self._awaited(blocks), reader):
                        deaths = 0
                        yield model_input
                    return
            except WorkerDied as died:
                deaths += 1
                what = f"reader worker {died.worker} of rank {self._task.rank} {died}"
                if deaths == 3:
                    raise SetupError(
                        f"{what}, the third failure before a batch was produced{died.remedy}. Set "
                        "training.workers: 0 to read in the training process"
                    ) from None
                print(f"{what}. New workers continue{died.remedy}", file=sys.stderr)

    def _awaited(self, blocks: Iterator[BatchBlock]) -> Iterator[BatchBlock]:
        """Yield the blocks, and register the awaited worker process for hang reports."""
        for number in count():
            worker = number % self._num_workers
            pids = {f"reader worker {worker}": pid for pid in self._pids[worker : worker + 1]}
            with doing("reading data", processes=pids):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _blocks(self, position: State) -> Generator[BatchBlock, None, None]:
        """Yield blocks of batches from the workers in order, starting at ``position``."""
        context = WorkerContext()
        workers: list[tuple[WorkerProcess, Connection]] = []
        try:
            for number in range(self._num_workers):
                ours, theirs = Pipe()
                arguments = theirs, self._task, position, number, self._num_workers
                workers.append((context.Process(target=_work, args=arguments), ours))
                workers[-1][0].start()
                theirs.close()
                ours.send(True)
            self._pids = [process.pid or 0 for process, _ in workers]
            for number in count():
                worker = number % self._num_workers
                process, connection = workers[worker]
                try:
                    size, packing = connection.recv()
                    file = recv_handle(connection)
                    connection.send(True)
                except (EOFError, OSError) as error:
                    raise WorkerDied(worker, process) from error
                start = time.perf_counter()
                block: BatchBlock = decode_file(file, size, self._pin_memory)
                spent = time.perf_counter() - start
                # This thread pins while the trainer computes.
                took = (packing + spent, 0.0) if self._pin_memory else (packing, spent)
                yield block.moved(*took)
        finally:
            for process, _ in workers:
                process.kill()
            for process, connection in workers:
                process.join()
                connection.close()


def _work(
    connection: Connection, task: ReadTask, position: State, worker: int, num_workers: int
) -> None:
    """Run a worker process: produce its blocks, each when the trainer requests it."""
    from recd_plugins.runtime.imports import silence_upstream

    silence_upstream()
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    try:
        blocks: Iterable[BatchBlock] = task.open().blocks(position, worker, num_workers)
    except Exception as error:
        blocks = [BatchBlock(worker, [], portable(error))]
    iterator = iter(blocks)
    with suppress(EOFError, ConnectionError):  # the trainer has ended
        while connection.recv() and (block := next(iterator, None)) is not None:
            start = time.perf_counter()
            file, size = encode_to_file(block)
            connection.send((size, time.perf_counter() - start))
            send_handle(connection, file, os.getppid())
            os.close(file)


class WorkerProcess(ForkServerProcess):
    """A worker process that ignores signals and exits when the training process exits.

    Workers are forked by a server that has imported their modules. Forking the trainer would be
    unsafe, since its threads may hold locks.
    """

    def start(self) -> None:
        self._environ, self._folder = dict(os.environ), Path.cwd()
        # Hides the trainer's script, since multiprocessing would run it in the worker.
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
        adopt_environ(self._environ)  # the server has its own
        os.chdir(self._folder)
        for stream in (sys.stdout, sys.stderr):
            show_controls(stream)
        super().run()


class WorkerContext(ForkServerContext):
    """A multiprocessing context whose processes are ``WorkerProcess``."""

    Process = WorkerProcess

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(
            ["recd_plugins.runtime.fork_server", "recd_plugins.data.worker_imports"]
        )


def start_server() -> None:
    """Start the server process that forks workers. It imports modules in the background."""
    WorkerContext()
    start_fork_server()


class WorkerDied(Exception):
    """Raised if a worker process dies. ``remedy`` is advice for the user; may be empty."""

    def __init__(self, worker: int, process: WorkerProcess) -> None:
        process.join(2.0)  # the connection breaks before the exit code is known
        code = process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else ""
        self.worker = worker
        self.remedy = _REMEDY if name == "SIGKILL" else ""
        how = f"was killed by {name}" if name else f"ended with exit code {code}"
        super().__init__(f"(process {process.pid}) {how}")


def hand_out(blocks: Iterable[BatchBlock], reader: Reader) -> Iterator[ModelInput]:
    """Yield the batches of blocks, and move ``reader`` to the position after each batch."""
    for block in blocks:
        for model_input, position in block.batches:
            reader.load_state_dict(position)
            yield model_input
        if isinstance(block.end, Exception):
            raise block.end
        if block.end is not None:
            reader.load_state_dict(block.end)
            return
