"""The server that readers and ranks are forked from outlives the signal that ends a run."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import multiprocessing, os, signal, time
from multiprocessing import forkserver
from recd_plugins.data.worker_processes import start_server

start_server()
context = multiprocessing.get_context("forkserver")
for _ in range(2):
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)
    time.sleep(0.2)
    process.terminate()
    process.join()
    print(process.exitcode)
"""


def test_it_stays_and_what_it_forks_ends_by_sigterm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["-15", "-15"]
