"""The Ray cluster of a run: one that exists, or one that is started on each machine."""

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

# Seconds for a cluster of this run to end, for its processes after their host, and for the other
# ranks to leave it.
_LEAVE_SECONDS, _END_SECONDS, _PATIENCE_SECONDS = 20.0, 2.0, 60.0
# Readers that are ahead of their trainer wait for it, and take seconds to start anew.
_IDLE_SECONDS = 600
# Ray starts with no less.
_LEAST_STORE_BYTES = 80_000_000


@dataclass
class RayCluster:
    """Ray cluster of the readers of a rank.

    Attributes:
        address: of Ray.
        ranks: number of ranks that share it.
        token: lets a process in. This and the following are for a cluster that ends with the run.
        lock: held while this rank uses the cluster.
        folder: its files.
        host: the process that holds it, in the rank that started it.
        processes: of Ray, in the same rank; its agents outlive a host that is killed.
    """

    address: str
    ranks: int
    token: str | None = None
    lock: IO[str] | None = None
    folder: Path | None = None
    host: Helper | None = field(default=None, repr=False)
    processes: list[psutil.Process] = field(default_factory=list, repr=False)

    def leave(self) -> None:
        """Leave the cluster. In the rank that started it, it ends with the last rank."""
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
    """Join the cluster that the options name, or one for the ranks of this machine.

    Without an address this is a collective call if there is a process group: the first rank of each
    machine starts Ray and tells the others.
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
                raise SetupError(answer["message"])
        mine = answers[ranks.index(here[0])]
        lock = Path(mine["lock"]).open()  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_SH)
        _gather(None)  # nobody leaves before all have come
    except BaseException:
        if host is not None:
            host.leave(_LEAVE_SECONDS)
        raise
    processes = [] if host is None else host.children()
    folder = Path(mine["lock"]).parent
    return RayCluster(mine["address"], len(here), mine["token"], lock, folder, host, processes)


def _start(options: RayOptions, ranks: int) -> tuple[Helper, dict[str, str]]:
    # Ray runs what it is sent, and its ports are open to the network.
    token = secrets.token_hex(32)
    host = Helper(
        "recd_plugin_dsi.cluster",
        token,
        # By default Ray lowers the priority of readers, and trainers would wait for them.
        RAY_worker_niceness="0",
        # By default Ray ends processes that wait for a second if there are more than CPUs.
        RAY_idle_worker_killing_time_threshold_ms=str(_IDLE_SECONDS * 1000),
        # A node is lost after five of these, by default after 15 s.
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


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks; only this one's without a process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main() -> None:
    """Hold a Ray cluster of one machine until the trainer that started it and all ranks are done.

    Ranks that use it hold a shared lock of a file; a rank that dies loses it.
    """
    connection = serve()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    _, fields = connection.recv()
    # Short, as sockets stand in it. For this user alone; Ray opens its own folder, inside, to all.
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
