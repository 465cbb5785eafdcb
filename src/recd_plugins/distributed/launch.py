"""Ranks on this machine: processes that share a process group, and what happens when one fails."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self, TypeVar

from recd_plugins.activity import said_if_long
from recd_plugins.cores import threads_of_a_rank
from recd_plugins.distributed.hang_watch import HangLimits, HangWatch
from recd_plugins.distributed.rank_process import (
    HOST,
    LAUNCHED,
    Failure,
    RankSetup,
    leave_process_group,
    serve,
)
from recd_plugins.distributed.signals import passed_on
from recd_plugins.errors import RankError, RecdError, SetupError, on_rank
from recd_plugins.processes import kill_stopped_below, start_fork_server, starting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

_LAUNCHER = "start this with torchrun, or without RANK in the environment to start ranks here"
_MOST_DIGITS = 9

CUDA_BACKEND = "cpu:gloo,cuda:nccl"
_DEFAULT_TIMEOUT = timedelta(minutes=30)
# Seconds after which a rank says that it waits for others to start.
_LONG_WAIT = 60.0
# After the first failure: long enough for the operating system to report a process that was
# killed, whose peers complain about their broken connection before it does.
_GRACE_SECONDS = 1.0

_CAUSES = {
    "SIGKILL": "; where nobody killed it, the machine ran out of memory: use fewer ranks or a "
    "smaller batch or model",
    # gloo ends the process where ranks take part in a collective with tensors of other sizes.
    "SIGABRT": ": native code gave up, and what it wrote stands above. The ranks may have got out "
    "of step: does the dataset give every rank as many batches as len(reader) says, and does every "
    "rank build the same model?",
}


def backend_for(device_type: str) -> str:
    """The process group's backend: gloo, and NCCL next to it where tensors are on CUDA."""
    return CUDA_BACKEND if device_type == "cuda" else "gloo"


def launch(
    function: Callable[..., T],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: timedelta = _DEFAULT_TIMEOUT,
    local_world_size: int | None = None,
    threads: int | None = None,
    hang_limits: HangLimits | None = None,
    interruptible: bool = False,
) -> list[T]:
    """Run ``function(rank, world_size, *args)`` on ``world_size`` ranks; returns by rank.

    Arguments and parameters are those of ``Ranks``. See ``Ranks.run`` for the errors.
    ``interruptible`` says that the function ends by itself where ``signals.passed_on`` asks it to.
    """
    ranks = Ranks(
        world_size,
        backend=backend,
        timeout=timeout,
        local_world_size=local_world_size,
        threads=threads,
        hang_limits=hang_limits,
    )
    # From before they start until they are gone, when their results are here.
    with ranks.asked_to_end() if interruptible else nullcontext(), ranks:
        return ranks.run(function, *args)


class Ranks:
    """A context in which ``world_size`` processes share one process group.

    Args:
        world_size: number of processes.
        backend: of ``torch.distributed``; with CUDA in it rank i uses CUDA device i, and ranks
            share devices where there are fewer of these (which NCCL refuses).
        timeout: for the start and for each collective.
        local_world_size: ranks a node, to pretend several nodes; all of them without it.
        threads: torch's threads a rank; without it OMP_NUM_THREADS, or the machine's cores shared
            out, at least 1.
        hang_limits: say on stderr where nothing moves, and end the ranks.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout: timedelta = _DEFAULT_TIMEOUT,
        local_world_size: int | None = None,
        threads: int | None = None,
        hang_limits: HangLimits | None = None,
    ) -> None:
        self.world_size = world_size
        self._setup = RankSetup(
            world_size=world_size,
            local_world_size=local_world_size or world_size,
            backend=backend,
            timeout=timeout,
            threads=threads or threads_of_a_rank(world_size),
            environ=dict(os.environ),
            beats=None if hang_limits is None else hang_limits.interval,
        )
        self._hang_limits = hang_limits
        self._watch: HangWatch | None = None
        self._store: TCPStore | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    @property
    def alive(self) -> bool:
        """Whether ``run`` can be called: after a failure it cannot."""
        return bool(self._processes)

    def __enter__(self) -> Self:
        context = _context(self._setup.backend)
        if context.get_start_method() == "forkserver":
            start_fork_server()
        # Here, not in a rank: one that is stopped would take it along.
        self._store = store = _open_store(self._setup.timeout)
        setup = replace(self._setup, port=store.port)
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(  # type: ignore[attr-defined]
                    target=serve, args=(rank, theirs, setup), name=f"rank {rank}"
                )
                with starting("ranks"):
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
            if self._hang_limits is not None:
                self._watch = HangWatch(
                    store,
                    self.world_size,
                    self._hang_limits,
                    say=lambda text: print(text, file=sys.stderr, flush=True),
                    processes=[process.pid or 0 for process in self._processes],
                )
            self._collect(set(range(self.world_size)))
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self._kill()

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call ``function(rank, world_size, *args)`` on every rank; the results by rank.

        ``function``, ``args`` and results travel by pickle. One failure ends all ranks.

        Raises:
            RankError: a rank raised; carries its traceback.
            RecdError: a rank raised one, which is passed on as it is.
            SetupError: a rank was killed or ended by itself.
        """
        if not self.alive:
            raise RuntimeError("these ranks have ended")
        try:
            request = pickle.dumps((function, args))
            for connection in self._connections:
                with suppress(BrokenPipeError):  # _collect reports the dead rank
                    connection.send_bytes(request)
            return [
                result for _, result in sorted(self._collect(set(range(self.world_size))).items())
            ]
        except BaseException:
            self._kill()
            raise

    def asked_to_end(self) -> AbstractContextManager[None]:
        """A context in which signals that end a run are passed on to the ranks."""
        return passed_on(self._processes)

    def close(self) -> None:
        """Let every rank leave the process group and end."""
        for connection in self._connections:
            with suppress(BrokenPipeError):
                connection.send_bytes(b"")
        for process in self._processes:
            process.join(timeout=10)
        self._kill()

    def _kill(self) -> None:
        # Readers are forked from the server of the ranks, so they are below none of them.
        for stopped in [] if self._watch is None else self._watch.stopped_here():
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGKILL)
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                kill_stopped_below(process.pid)
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._watch = self._store = None

    def _collect(self, ranks: set[int]) -> dict[int, Any]:
        """One answer of each of ``ranks``; raises the most telling of the failures."""
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline: float | None = None
        while pending := ranks - answers.keys() - failures.keys():
            ready = self._wait(pending, deadline)
            if not ready:
                break
            for rank in ready:
                answer = self._receive(rank)
                if isinstance(answer, Failure):
                    failures[rank] = answer
                    deadline = deadline or time.monotonic() + _GRACE_SECONDS
                else:
                    answers[rank] = answer
        if failures:
            _raise(failures, self.world_size, self._hang_limits)
        return answers

    def _wait(self, ranks: set[int], deadline: float | None) -> list[int]:
        """The ranks that have something to say or have ended; none at the deadline."""
        sources: dict[Any, int] = {}
        for rank in ranks:
            sources[self._connections[rank]] = rank
            sources[self._processes[rank].sentinel] = rank
        while deadline is None and self._watch is not None and self._hang_limits is not None:
            if ready := wait(list(sources), self._hang_limits.interval):
                return sorted({sources[source] for source in ready})
            self._watch.look()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return sorted({sources[source] for source in wait(list(sources), left)})

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return Failure("", None, self._processes[rank].exitcode)


def _context(backend: str) -> multiprocessing.context.BaseContext:
    """How ranks are made.

    A fork server that has imported what ranks need starts one in a tenth of the time that an
    interpreter of its own takes (4 s of imports). CUDA does not survive a fork of a process that
    merely asked for it, so ranks with CUDA get interpreters of their own.
    """
    if "cuda" in backend:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["recd_plugins.fork_server", "recd_plugins.training.rank_imports"]
    )
    return context


def _open_store(timeout: timedelta) -> TCPStore:
    """The ranks' store, on a port that the operating system gives it."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(HOST, 0, is_master=True, timeout=timeout, wait_for_workers=False)


def _raise(failures: Mapping[int, Failure], world_size: int, limits: HangLimits | None) -> None:
    """Raise the cause: a death comes before the complaints of the peers, the first before later."""

    def order(rank: int) -> tuple[bool, bool]:
        return failures[rank].text != "", failures[rank].error is None

    rank = min(failures, key=order)
    failure = failures[rank]
    if failure.error is not None:
        said = {str(each.error) for each in failures.values()}
        everywhere = len(failures) == world_size and len(said) == 1
        raise failure.error if everywhere else on_rank(failure.error, rank)
    if failure.text:
        raise RankError(f"rank {rank} failed:\n{failure.text}", f"{failure.what}, on rank {rank}")
    code = failure.exit_code or 0
    advice = "" if limits is None else f". {limits.advice()}"
    if code < 0:
        name = signal.Signals(-code).name
        raise SetupError(f"rank {rank} was killed by {name}{_CAUSES.get(name, '')}{advice}")
    raise SetupError(f"rank {rank} ended with exit code {code} before it had a result{advice}")


def torchrun_rank() -> int | None:
    """The rank that ``torchrun`` (or another launcher with its environment) gave this process.

    None where there is no such launcher, and in ranks of ``launch``.

    Raises:
        SetupError: the environment has one half of it, or what no launcher says.
    """
    missing = {"RANK", "WORLD_SIZE"} - os.environ.keys()
    if LAUNCHED in os.environ or len(missing) == 2:
        return None
    for name in missing:
        other = "RANK" if name == "WORLD_SIZE" else "WORLD_SIZE"
        raise SetupError(
            f"{other} is {os.environ[other]!r} and {name} is not set, so this process would train "
            "alone: have the launcher set both, or neither of them to start ranks here"
        )
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank >= world_size:
        raise SetupError(f"RANK is {rank} and WORLD_SIZE {world_size}: {_LAUNCHER}")
    return rank


def torchrun_ranks_per_node() -> int:
    """Ranks on this machine; all of them where the launcher does not say."""
    return _number("LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE", 1)


def torchrun_local_rank() -> int:
    """The rank among those of this machine; where nobody says it, nodes have consecutive ranks."""
    if "LOCAL_RANK" in os.environ:
        return _number("LOCAL_RANK", 0)
    return _number("RANK", 0) % torchrun_ranks_per_node()


def _number(name: str, least: int) -> int:
    """A whole number of torchrun's environment."""
    text = os.environ[name]
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
        raise SetupError(f"{name} is {text!r}, no whole number from {least} on: {_LAUNCHER}")
    return int(text)


def _long_wait_said(timeout: timedelta) -> AbstractContextManager[None]:
    """A context in which ranks wait for each other: the first of a node says so when that is long.

    Ranks watch each other from when all are there, and torch waits without a word until then.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return nullcontext()
    return said_if_long(
        _LONG_WAIT,
        f"rank {os.environ['RANK']} has waited {_LONG_WAIT:g} s for all of "
        f"{os.environ['WORLD_SIZE']} ranks to start, and gives up after "
        f"{timeout.total_seconds():g}: is torchrun there on every node, and are its ranks?",
    )


@contextmanager
def join_torchrun(
    backend: str = "gloo", timeout: timedelta = _DEFAULT_TIMEOUT
) -> Iterator[tuple[int, int]]:
    """Be a rank of ``torchrun``: in the context there is a process group; yields rank, world size.

    Raises:
        RecdError: this process was not started by a launcher with torchrun's environment.
    """
    import torch
    import torch.distributed as dist

    if torchrun_rank() is None:
        raise RecdError("RANK and WORLD_SIZE are not set: start this with torchrun")
    if "nccl" in backend:
        torch.cuda.set_device(torchrun_local_rank())
    try:
        with _long_wait_said(timeout):
            dist.init_process_group(backend, timeout=timeout)
    except (ValueError, RuntimeError) as error:  # what MASTER_ADDR and MASTER_PORT do not lead to
        reason = str(error).splitlines()[0]
        raise SetupError(f"the ranks of torchrun do not find each other: {reason}") from error
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        leave_process_group()
