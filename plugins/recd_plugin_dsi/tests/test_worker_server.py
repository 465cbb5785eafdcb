"""What Ray starts as a worker is forked, or an interpreter of its own where no server is."""

import subprocess
import sys
import time

import pytest

from recd_plugin_dsi import worker_start
from recd_plugin_dsi.worker_server import WorkerServer


def start(address, output):
    command = [sys.executable, worker_start.__file__, "--help"]
    with output.open("w") as file:
        subprocess.run(command, env={worker_start.SERVER: address}, stdout=file, check=True)


@pytest.fixture
def server():
    server = WorkerServer()
    yield server
    server.end()


def test_a_worker_is_forked(server, tmp_path):
    output = tmp_path / "output"
    start(server.address, output)
    deadline = time.monotonic() + 120
    while "--raylet-name" not in output.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert output.read_text().startswith("usage: ray._private.workers.default_worker")


def test_a_worker_starts_without_a_server(server, tmp_path):
    server.end()
    start(server.address, tmp_path / "output")
    assert (tmp_path / "output").read_text().startswith("usage: default_worker.py")
