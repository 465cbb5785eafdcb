from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing, os, signal, time
from multiprocessing import forkserver
from recd_plugins.data.workers import start_server

start_server()
os.kill(forkserver._forkserver._forkserver_pid, signal.SIGINT)  # while it imports
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


def test_it_ignores_signals_and_what_it_forks_ends_by_sigterm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["-15", "-15"]
    assert "Traceback" not in done.stderr


SHADOWED = """
import multiprocessing
from multiprocessing import forkserver
from recd_plugins.data.workers import WorkerContext
from recd_plugins.runtime.processes import start_fork_server, safe_path

forkserver.set_forkserver_preload = lambda modules: None
with safe_path():
    multiprocessing.get_context("spawn").Process(target=print, args=("spawned",)).start()
start_fork_server()
WorkerContext().Process(target=print, args=("forked",)).start()
"""


def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("torch", "socket", "queue", "typing", "random", "json", "recd_plugins"):
        tmp_path.joinpath(f"{name}.py").write_text("raise ImportError('shadowed')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SHADOWED],
        capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert sorted(done.stdout.split()) == ["forked", "spawned"], done.stderr
