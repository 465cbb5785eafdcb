"""A process that holds a Ray cluster of one machine, for as long as its run takes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from recd_plugin_dsi.helper import serve

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
    try:
        _start(folder / "r", **fields)
        lock = folder / "lock"
        lock.touch()
        address = ray.get_runtime_context().gcs_address
        connection.send(("ready", {"address": address, "lock": str(lock)}))
        while True:
            connection.recv()
    except EOFError:
        _wait_for_ranks(folder / "lock")
    except Exception as error:
        connection.send(("failed", {"message": f"{type(error).__name__}: {error}"}))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, cpus: int | None, memory: int) -> None:
    os.environ["RAY_TMPDIR"] = str(folder)
    options: dict[str, Any] = {"_temp_dir": str(folder)}
    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=memory,
        include_dashboard=False,
        log_to_driver=False,
        **options,
    )


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
