"""A process that holds a Ray cluster of one machine, for as long as its run takes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from recd_plugin_dsi import worker_start
from recd_plugin_dsi.helper import serve

if TYPE_CHECKING:
    from ray._private.node import Node

# Other ranks leave when this one does, or a little later.
_PATIENCE_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 0.1


def main() -> None:
    """Start Ray, say where it is, and end it when the trainer that asked for it and all are done.

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
            node = _start(folder / "r", **fields)
            at_end.callback(node.kill_all_processes, check_alive=False, allow_graceful=True)
            lock = folder / "lock"
            lock.touch()
            connection.send(("ready", {"address": node.gcs_address, "lock": str(lock)}))
            while True:
                connection.recv()
        except EOFError:
            _wait_for_ranks(folder / "lock")
        except Exception as error:
            connection.send(("failed", {"message": f"{type(error).__name__}: {error}"}))


def _start(folder: Path, cpus: int | None, memory: int) -> Node:
    # What ``ray.init`` calls; there is no public way to say what runs as a worker, nor to leave
    # out what nobody asks here: a dashboard, logs at the driver, more machines. Ray 2.60.
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Head(Node):
        def start_api_server(self, **_: object) -> None:
            pass

    os.environ["RAY_TMPDIR"] = str(folder)
    params = RayParams(
        num_cpus=cpus,
        object_store_memory=memory,
        temp_dir=str(folder),
        worker_path=worker_start.__file__,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # its type is wrong
        no_monitor=True,
    )
    return Head(params, head=True, shutdown_at_exit=False)


def _wait_for_ranks(lock: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with lock.open() as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            else:
                return


if __name__ == "__main__":
    main()
