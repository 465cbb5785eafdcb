"""Joins an existing Ray cluster, or starts one on each machine for a run."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from recd_plugin_dsi.helper import Helper, serve
from recd_plugin_dsi.options import RayOptions
from recd_plugins.api import SetupError

# Seconds for this run's cluster to end, for its processes to end after their host, and for the
# other ranks to leave it.
_LEAVE_SECONDS, _END_SECONDS, _PATIENCE_SECONDS = 20.0, 2.0, 60.0
# Keep idle readers: a reader that is ahead of its trainer waits, and a restart takes seconds.
_IDLE_SECONDS = 600
# Ray's minimum object store size.
_LEAST_STORE_BYTES = 80_000_000


@dataclass
class RayCluster:
    """The Ray cluster that the readers of a rank use.

    Attributes:
        address: ``HOST:PORT`` of the cluster, or ``auto``.
        ranks: number of ranks that share the cluster.
        token: authentication token; None if the run joined an existing cluster.
        lock: open lock file. A shared lock is held while this rank uses the cluster.
        folder: folder with the files of a cluster that the run started.
        host: the process that runs the cluster; None in ranks that did not start it.
        processes: Ray's processes; empty in ranks that did not start the cluster.
    """

    address: str
    ranks: int
    token: str | None = None
    lock: IO[str] | None = None
    folder: Path | None = None
    host: Helper | None = field(default=None, repr=False)
    processes: list[psutil.Process] = field(default_factory=list, repr=False)

    def leave(self) -> None:
        """Leave the cluster. The rank that started it waits for the other ranks, then stops it."""
        if self.lock is not None:
            self.lock.close()
        if self.host is None:
            return
        host, self.host = self.host, None
        if host.leave(_LEAVE_SECONDS):
            for process in psutil.wait_procs(self.processes, timeout=_END_SECONDS)[1]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)


def join(options: RayOptions, world_size: int) -> RayCluster:
    """Join the Ray cluster at ``options.address``, or start one per machine if it is None.

    Starting a cluster is a collective call if a process group exists: the first rank of each
    machine starts Ray and sends its address to the other ranks.
    """
    if options.address is not None:
        return RayCluster(options.address, world_size)
    me = socket.gethostname(), os.getpid()
    ranks = _gather(me)
    here = [rank for rank in ranks if rank[0] == me[0]]
    host, told = _start(options, len(here)) if here[0] == me else (None, None)
    answers = _gather(told)
    try:
        for answer in filter(None, answers):
            if "message" in answer:
                raise SetupError(f"dsi.ray: {answer['message']}")
        mine = answers[ranks.index(here[0])]
        lock = Path(mine["lock"]).open()  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_SH)
        _gather(None)  # no rank leaves before all have joined
    except BaseException:
        if host is not None:
            host.leave(_LEAVE_SECONDS)
        raise
    processes = [] if host is None else host.children()
    folder = Path(mine["lock"]).parent
    return RayCluster(mine["address"], len(here), mine["token"], lock, folder, host, processes)


def _start(options: RayOptions, ranks: int) -> tuple[Helper, dict[str, str]]:
    # Ray executes everything that it receives, and its ports are open to the network.
    token = secrets.token_hex(32)
    host = Helper(
        "recd_plugin_dsi.cluster",
        token,
        # By default Ray lowers the priority of readers, which would slow down trainers.
        RAY_worker_niceness="0",
        # By default Ray ends processes that are idle for a second if there are more than CPUs.
        RAY_idle_worker_killing_time_threshold_ms=str(_IDLE_SECONDS * 1000),
        # A node is lost after this many missed checks; the default is 15 s.
        RAY_health_check_period_ms="1000",
    )
    # Half of the store may hold blocks that are being written or sent.
    memory = max(2 * ranks * options.memory_bytes, _LEAST_STORE_BYTES)
    host.send("start", cpus=options.cpus, memory=memory)
    try:
        kind, fields = host.receive(options.start_timeout)
    except TimeoutError:
        message = (
            f"Ray did not start within {options.start_timeout:.0f} s. Check that "
            "`ray start --head` works on this machine, or raise start_timeout."
        )
        return host, {"message": message}
    except EOFError as error:
        return host, {"message": f"Ray did not start. Its last output:\n{error}"}
    if kind == "failed":
        why = fields["message"]
        hint = ". Set TMPDIR to a shorter path." if "AF_UNIX path length" in why else ""
        return host, {"message": f"Ray did not start: {why}{hint}"}
    return host, {**fields, "token": token}


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks, or only this value if there is no process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main() -> None:
    """Run a Ray cluster in this process until all ranks of this machine have left it.

    Each rank holds a shared file lock, which the operating system releases if the rank dies.
    """
    connection = serve()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    _, fields = connection.recv()
    # Short, because socket paths are limited. Only this user has access; Ray opens its own
    # subfolder.
    folder = Path(tempfile.mkdtemp(prefix="recd-ray-"))
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            import ray

            os.environ["RAY_TMPDIR"] = str(folder / "r")
            context: Any = ray.init(
                "local",
                num_cpus=fields["cpus"],
                object_store_memory=fields["memory"],
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder / "r"),
            )
            at_end.callback(ray.shutdown)
            (folder / "lock").touch()
            address = context.address_info["gcs_address"]
            connection.send(("ready", {"address": address, "lock": str(folder / "lock")}))
            while True:
                connection.recv()
        except EOFError:
            _wait_for_ranks(folder / "lock")
        except Exception as error:
            connection.send(("failed", {"message": f"{type(error).__name__}: {error}"}))


def _wait_for_ranks(lock: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with lock.open() as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return


if __name__ == "__main__":
    main()
