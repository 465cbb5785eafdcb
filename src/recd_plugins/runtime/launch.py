"""Starts the processes of a distributed run on this machine, or joins the processes of torchrun."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from recd_plugins.report.output import persistent_output
from recd_plugins.runtime.errors import (
    FAILED_CALL,
    RankError,
    RecdError,
    SetupError,
    in_a_line,
    on_rank,
)
from recd_plugins.runtime.machine import threads_of_a_rank
from recd_plugins.runtime.processes import (
    adopt_environ,
    end_with_parent,
    ignore_terminal,
    portable,
    safe_path,
    share_fork_server,
    start_fork_server,
    terminal_blocked,
)
from recd_plugins.runtime.signals import LAUNCHED, passed_on
from recd_plugins.runtime.watch import HangLimits, HangWatch, Heart

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

CUDA_BACKEND = "cpu:gloo,cuda:nccl"
_HOST = "127.0.0.1"
_DEFAULT_TIMEOUT = timedelta(minutes=30)
# Seconds to wait after the first failure: peers of a killed process fail before its death is
# reported.
_GRACE_SECONDS = 1.0

_CAUSES = {
    "SIGKILL": ", probably because the machine ran out of memory. Use fewer ranks, a smaller "
    "batch or a smaller model",
    # gloo aborts if tensors of a collective differ in size.
    "SIGABRT": " after an error in native code, which is printed above. Check that every rank "
    "reads len(reader) batches and builds the same model",
}


def backend_for(device_type: str) -> str:
    """Return the backend of the process group: NCCL for ``cuda``, gloo for other devices."""
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
    """Run ``function(rank, world_size, *args)`` on ``world_size`` ranks. Return all results.

    ``Ranks`` describes the options, and ``Ranks.run`` the errors. If ``interruptible``, the first
    SIGINT, SIGTERM or SIGHUP is forwarded to the ranks, so that they can end after their step.
    """
    ranks = Ranks(
        world_size,
        backend=backend,
        timeout=timeout,
        local_world_size=local_world_size,
        threads=threads,
        hang_limits=hang_limits,
    )
    with passed_on(ranks.processes) if interruptible else nullcontext(), ranks:
        return ranks.run(function, *args)


class _Setup(NamedTuple):
    """Settings of all ranks. ``beats`` is the number of seconds between heartbeats."""

    world_size: int
    local_world_size: int
    backend: str
    timeout: timedelta
    threads: int
    environ: dict[str, str]
    port: int
    beats: float | None


@dataclass(frozen=True)
class _Failure:
    text: str
    error: RecdError | None
    exit_code: int | None = None
    what: str = ""
    call: str = ""


@dataclass(eq=False)
class Ranks:
    """Context that starts ``world_size`` processes in one process group.

    torch's elastic launcher is not used, because it returns errors as text and kills ranks 30 s
    after a signal, too soon to write a checkpoint.

    Args:
        backend: backend of ``torch.distributed``. With NCCL, rank i uses GPU i modulo the number of
            GPUs.
        timeout: timeout of the start and of each collective.
        local_world_size: number of ranks per simulated node; None for a single node.
        threads: torch threads per rank; by default OMP_NUM_THREADS, or an equal share of cores.
        hang_limits: when to report a hang and to kill the ranks; None for no limits.
    """

    world_size: int
    _: KW_ONLY
    backend: str = "gloo"
    timeout: timedelta = _DEFAULT_TIMEOUT
    local_world_size: int | None = None
    threads: int | None = None
    hang_limits: HangLimits | None = None

    def __post_init__(self) -> None:
        self._watch: HangWatch | None = None
        self._store: TCPStore | None = None
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    @property
    def alive(self) -> bool:
        """Return whether ``run`` can be called. False after an error, which ends all ranks."""
        return bool(self.processes)

    def __enter__(self) -> Self:
        from torch._C._distributed_c10d import TCPStore

        context = _context(self.backend)
        if context.get_start_method() == "forkserver":
            start_fork_server()
        # In this process, as a stopped rank would stop it too.
        self._store = store = TCPStore(
            _HOST, 0, is_master=True, timeout=self.timeout, wait_for_workers=False
        )
        setup = _Setup(
            self.world_size,
            self.local_world_size or self.world_size,
            self.backend,
            self.timeout,
            self.threads or threads_of_a_rank(self.world_size),
            dict(os.environ),
            store.port,
            None if self.hang_limits is None else self.hang_limits.interval,
        )
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(  # type: ignore[attr-defined]
                    target=_serve, args=(rank, theirs, setup), name=f"rank {rank}"
                )
                with safe_path(), terminal_blocked():
                    process.start()
                theirs.close()
                self.processes.append(process)
                self._connections.append(ours)
            if self.hang_limits is not None:
                self._watch = HangWatch(
                    store,
                    self.world_size,
                    self.hang_limits,
                    say=lambda text: print(text, file=sys.stderr, flush=True),
                )
            self._collect()
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
        """Call ``function(rank, world_size, *args)`` on every rank. Return one result per rank.

        ``function``, ``args`` and results are pickled. If one rank fails, all ranks are killed.

        Raises:
            RankError: the function raised another exception than RecdError. Contains the traceback.
            RecdError: the function raised this error.
            SetupError: a rank was killed or exited.
        """
        if not self.alive:
            raise RuntimeError(
                "the ranks of this process group have exited. Create a new Ranks object."
            )
        try:
            request = pickle.dumps((function, args))
            for connection in self._connections:
                with suppress(BrokenPipeError):  # _collect reports the dead rank
                    connection.send_bytes(request)
            return self._collect()
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Let all ranks exit normally. Ranks that do not exit within 10 s are killed."""
        for connection in self._connections:
            with suppress(BrokenPipeError):
                connection.send_bytes(b"")
        for process in self.processes:
            process.join(timeout=10)
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self.processes, self._connections = [], []
        self._watch = self._store = None

    def _collect(self) -> list[Any]:
        """Wait for the result of every rank. Raise the error that caused all others."""
        answers: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        deadline: float | None = None
        while pending := set(range(self.world_size)) - answers.keys() - failures.keys():
            ready = self._wait(pending, deadline)
            if not ready:
                break
            for rank in ready:
                answer = self._receive(rank)
                if isinstance(answer, _Failure):
                    failures[rank] = answer
                    deadline = deadline or time.monotonic() + _GRACE_SECONDS
                else:
                    answers[rank] = answer
        if failures:
            _raise(failures, self.world_size, self.hang_limits)
        return [answers[rank] for rank in range(self.world_size)]

    def _wait(self, ranks: set[int], deadline: float | None) -> list[int]:
        """Wait until a rank sends a result or exits. Return these ranks, or [] at the deadline."""
        sources: dict[Any, int] = {}
        for rank in ranks:
            sources[self._connections[rank]] = rank
            sources[self.processes[rank].sentinel] = rank
        while deadline is None and self._watch is not None and self.hang_limits is not None:
            if ready := wait(list(sources), self.hang_limits.interval):
                return sorted({sources[source] for source in ready})
            self._watch.look()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return sorted({sources[source] for source in wait(list(sources), left)})

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            return _Failure("", None, self.processes[rank].exitcode)


def _context(backend: str) -> multiprocessing.context.BaseContext:
    """Return the multiprocessing context: "spawn" for CUDA, otherwise a "forkserver".

    The fork server imports torch and TorchRec once, which takes 4 s.
    """
    if "cuda" in backend:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["recd_plugins.runtime.fork_server", "recd_plugins.training.rank_imports"]
    )
    return context


def _raise(failures: Mapping[int, _Failure], world_size: int, limits: HangLimits | None) -> None:
    """Raise the most likely cause: a killed rank, else a RecdError, else another exception."""
    rank = min(failures, key=lambda r: (failures[r].text != "", failures[r].error is None))
    failure = failures[rank]
    if failure.error is not None:
        said = {str(each.error) for each in failures.values()}
        everywhere = len(failures) == world_size and len(said) == 1
        raise failure.error if everywhere else on_rank(failure.error, rank)
    if failure.text:
        failed = RankError(
            f"rank {rank} failed:\n{failure.text}", f"{failure.what}, on rank {rank}"
        )
        if failure.call:
            vars(failed)[FAILED_CALL] = failure.call
        raise failed
    code = failure.exit_code or 0
    advice = "." if limits is None else f". {limits.advice()}"
    if code < 0:
        name = signal.Signals(-code).name
        raise SetupError(f"rank {rank} was killed by {name}{_CAUSES.get(name, '')}{advice}")
    raise SetupError(
        f"rank {rank} exited with code {code} before it returned a result. Read the output above "
        f"to find the cause{advice}"
    )


def _serve(rank: int, connection: Connection, setup: _Setup) -> None:
    """Run in each rank: join the process group, then call the functions that ``run`` sends."""
    ignore_terminal()
    end_with_parent()
    share_fork_server()
    adopt_environ(setup.environ)
    with persistent_output():
        try:
            _join_process_group(rank, setup)
        except Exception as error:
            connection.send_bytes(pickle.dumps(_failure(error)))
            return
        # Not connection.send, by which torch sends tensors as handles that die with the rank.
        connection.send_bytes(pickle.dumps(None))
        with suppress(EOFError, BrokenPipeError):  # the parent was interrupted
            while request := connection.recv_bytes():
                connection.send_bytes(_call(rank, setup, request))
        _leave_process_group()


def _join_process_group(rank: int, setup: _Setup) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(setup.threads)
    local = setup.local_world_size
    if "cuda" in setup.backend:  # pretended nodes share this machine
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = TCPStore(_HOST, setup.port, is_master=False, timeout=setup.timeout)
    os.environ.update(
        {
            LAUNCHED: "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(setup.world_size),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(rank // local),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(setup.port),
            "OMP_NUM_THREADS": str(setup.threads),
        }
    )
    dist.init_process_group(
        setup.backend, store=store, rank=rank, world_size=setup.world_size, timeout=setup.timeout
    )


def _leave_process_group() -> None:
    """Destroy the process group, after collecting reference cycles that keep it alive.

    A gloo thread that is still alive when the interpreter exits would abort the process.
    """
    import torch.distributed as dist

    gc.collect()
    dist.destroy_process_group()


def _call(rank: int, setup: _Setup, request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        with nullcontext() if setup.beats is None else Heart(rank, setup.beats):
            return pickle.dumps(function(rank, setup.world_size, *args))
    except BaseException as error:
        return pickle.dumps(_failure(error))


def _failure(error: BaseException) -> _Failure:
    text = "".join(traceback.format_exception(error))
    known = portable(error) if isinstance(error, RecdError) else None
    call = getattr(error, FAILED_CALL, "")
    return _Failure(text, known, what=in_a_line(error), call=call)


def torchrun_rank() -> int | None:
    """Return this process's rank if torchrun started the process, otherwise None.

    Raises SetupError if only one of the variables RANK and WORLD_SIZE is set.
    """
    missing = {"RANK", "WORLD_SIZE"} - os.environ.keys()
    if LAUNCHED in os.environ or len(missing) == 2:
        return None
    for name in missing:
        other = "RANK" if name == "WORLD_SIZE" else "WORLD_SIZE"
        raise SetupError(
            f"{other} is {os.environ[other]!r} but {name} is not set, so this process would train "
            "alone. Set both variables, or unset both so that this command starts the ranks."
        )
    return int(os.environ["RANK"])


def torchrun_ranks_per_node() -> int:
    """Return the number of torchrun processes on this machine, from ``LOCAL_WORLD_SIZE``."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


@contextmanager
def join_torchrun(
    backend: str = "gloo", timeout: timedelta = _DEFAULT_TIMEOUT
) -> Iterator[tuple[int, int]]:
    """Initialize the process group under torchrun. Yield rank and world size.

    Raises:
        RecdError: the environment variables of torchrun are not set.
        SetupError: the ranks cannot connect to each other.
    """
    import torch
    import torch.distributed as dist

    if (rank := torchrun_rank()) is None:
        raise RecdError("RANK and WORLD_SIZE are not set. Start this program with torchrun.")
    if "nccl" in backend:  # without LOCAL_RANK nodes have consecutive ranks
        local_rank = os.environ.get("LOCAL_RANK", rank % torchrun_ranks_per_node())
        torch.cuda.set_device(int(local_rank))
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise SetupError(
            f"the ranks of torchrun cannot connect to each other: {reason}. Check MASTER_ADDR, "
            "MASTER_PORT and the network."
        ) from error
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        _leave_process_group()
