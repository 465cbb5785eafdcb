"""The Ray cluster of a run: one that is there, or one that is started on each machine."""

from __future__ import annotations

import fcntl
import secrets
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from recd_plugin_dsi import worker_start
from recd_plugin_dsi.helper import Helper
from recd_plugin_dsi.options import RayOptions
from recd_plugin_dsi.worker_server import WorkerServer
from recd_plugins.api import SetupError

# Of a cluster that is there: it answers at once.
_CONNECT_SECONDS = 5.0
# For a cluster that the run started, to end; it does so without being waited for, too.
_LEAVE_SECONDS = 20.0
# For what is left of a cluster whose host has ended.
_END_SECONDS = 2.0
# Readers that keep ahead of their trainer wait for it, and take seconds to start anew.
_IDLE_SECONDS = 600
# Ray starts with no less.
_LEAST_STORE_BYTES = 80_000_000


@dataclass
class RayCluster:
    """Where a rank's readers run. ``leave`` it in the end.

    Attributes:
        address: of Ray.
        ranks: that share it.
        token: that lets a process in, of a cluster that ends with the run.
        lock: held while this rank uses a cluster that ends with the run.
        host: the process that holds it, in the rank that started it.
        processes: of Ray, likewise; its agents outlive a host that is killed.
        folder: with its files, which do so too; None of a cluster that was there.
    """

    address: str
    ranks: int
    token: str | None = None
    lock: IO[str] | None = None
    host: Helper | None = field(default=None, repr=False)
    processes: list[psutil.Process] = field(default_factory=list, repr=False)
    folder: Path | None = None

    def leave(self) -> None:
        """Say that this rank is done. In the rank that started it, the cluster ends with the last.

        A second call does nothing.
        """
        if self.lock is not None:
            self.lock.close()
            self.lock = None
        if self.host is not None:
            ended = self.host.leave(_LEAVE_SECONDS)
            self.host = None
            if ended:
                _end(self.processes)
            if ended and self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)


def join(options: RayOptions, world_size: int) -> RayCluster:
    """The cluster that the options name, or one for the ranks of this machine.

    Without an address a collective call, where there is a process group: the first rank of each
    machine starts Ray and tells the others.
    """
    if options.address is not None:
        return RayCluster(_reachable(options.address), world_size)
    machine = socket.gethostname()
    machines = _gather(machine)
    ranks = machines.count(machine)
    rank = _rank()
    host, told = None, None
    if machines.index(machine) == rank:
        host, told = _start(options, ranks)
    answers: list[dict[str, str]] = [answer for answer in _gather(told) if answer is not None]
    first = [name for number, name in enumerate(machines) if machines.index(name) == number]
    try:
        for answer in answers:
            if "message" in answer:
                raise SetupError(answer["message"])
        mine = answers[first.index(machine)]
        lock = Path(mine["lock"]).open()  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_SH)
        _gather(None)  # nobody leaves before all have come
    except BaseException:
        if host is not None:
            host.leave(_LEAVE_SECONDS)
        raise
    processes = [] if host is None else host.children()
    folder = Path(mine["lock"]).parent
    return RayCluster(mine["address"], ranks, mine["token"], lock, host, processes, folder)


def agreed(value: bool) -> bool:
    """Whether it is so on every rank. A collective call, where there is a process group."""
    return all(_gather(value))


class _Host(Helper):
    """The process that holds Ray, and the one that its workers are forked from."""

    def __init__(self, token: str, **environ: str) -> None:
        self._workers = WorkerServer()
        environ[worker_start.SERVER] = self._workers.address
        super().__init__("recd_plugin_dsi.local_ray", token, **environ)

    def leave(self, patience: float) -> bool:
        """See ``Helper.leave``."""
        ended = super().leave(patience)
        self._workers.end()
        return ended


def _start(options: RayOptions, ranks: int) -> tuple[Helper, dict[str, str]]:
    # Ray runs what it is sent, and its ports are open to the network.
    token = secrets.token_hex(32)
    host = _Host(
        token,
        # By itself Ray puts its processes behind all others, and trainers would wait for readers
        # that wait for trainers.
        RAY_worker_niceness="0",
        # By itself Ray ends processes that wait for a second, where they are more than the CPUs.
        RAY_idle_worker_killing_time_threshold_ms=str(_IDLE_SECONDS * 1000),
        # A node is lost after five of these; by itself Ray takes 15 s.
        RAY_health_check_period_ms="1000",
    )
    # Half of the store may be in the making or on its way out.
    memory = max(2 * ranks * options.memory_bytes, _LEAST_STORE_BYTES)
    host.send("start", cpus=options.cpus, memory=memory)
    try:
        kind, fields = host.receive(options.start_timeout)
    except TimeoutError:
        message = f"Ray did not start within {options.start_timeout:.0f} s; try it alone: ray start"
        return host, {"message": message}
    except EOFError as error:
        return host, {"message": f"Ray did not start:\n{error}"}
    if kind == "failed":
        why = fields["message"]
        hint = "; set TMPDIR to a shorter folder" if "AF_UNIX path length" in why else ""
        return host, {"message": f"Ray did not start: {why}{hint}"}
    return host, {**fields, "token": token}


def _end(processes: list[psutil.Process]) -> None:
    """Kill those that do not end by themselves."""
    for process in psutil.wait_procs(processes, timeout=_END_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _reachable(address: str) -> str:
    if address == "auto":
        return address
    name, _, port = address.rpartition(":")
    remedy = "start one by `ray start --head`, or leave address out and the run starts its own"
    if not name or not port.isdigit():
        raise SetupError(f"address {address!r} of dsi.ray is not HOST:PORT, nor auto")
    try:
        socket.create_connection((name, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise SetupError(f"no Ray cluster answers at {address}: {error}; {remedy}") from None
    return address


def _gather(value: Any) -> list[Any]:
    """Of every rank; this one's alone where there is no process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
