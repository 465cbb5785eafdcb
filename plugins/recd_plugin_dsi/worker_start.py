"""The program that Ray starts as a worker: asks the server of ``worker_server.py`` to fork one.

Run as a script, and small: it imports neither Ray nor this package.
"""

from __future__ import annotations

import json
import os
import socket
import sys

#: Of the environment: where the server listens.
SERVER = "RECD_RAY_WORKER_SERVER"
# What Ray itself runs as a worker. 2.60.
_PROGRAM = "ray._private.workers.default_worker"


def main() -> None:
    """End once the server has forked the worker; without a server, become it."""
    command = [_PROGRAM, *sys.argv[1:]]
    if not _forked(command):
        os.execv(sys.executable, [sys.executable, "-P", "-m", *command])


def _forked(command: list[str]) -> bool:
    data = json.dumps([command, os.getcwd(), dict(os.environ)]).encode()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(os.environ[SERVER])
            socket.send_fds(server, [len(data).to_bytes(8, "little")], [0, 1, 2])
            server.sendall(data)
            return server.recv(1) != b""
    except OSError:
        return False


if __name__ == "__main__":
    main()
