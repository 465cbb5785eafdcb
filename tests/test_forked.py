"""Programs of tests and the fork server of readers and ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from tests import forked

RANKS = """
import os, sys, time
from recd_plugins.runtime.launch import launch

def job(rank, world_size, hang):
    print(rank, os.getsid(0), os.environ["MINE"], os.getcwd(), flush=True)
    print("from rank", rank, file=sys.stderr)
    while hang:
        time.sleep(0.1)

if __name__ == "__main__":
    launch(job, 2, len(sys.argv) > 1)
    sys.exit(7)
"""


def test_a_program_has_its_own_session_folder_environment_output_and_exit_code(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    done = forked.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "MINE": "yes"}
    )
    assert done.returncode == 7, done.stderr
    ranks, sessions, mine, folders = zip(*map(str.split, done.stdout.splitlines()), strict=True)
    assert sorted(ranks) == ["0", "1"]
    assert len({*sessions, str(os.getsid(0))}) == 2
    assert set(mine) == {"yes"}
    assert sorted(done.stderr.splitlines()) == ["from rank 0", "from rank 1"]
    assert len(set(folders)) == 1


def test_a_killed_program_takes_along_what_it_started(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    program = forked.Program([sys.executable, script, "hang"], env={**os.environ, "MINE": "yes"})
    program.first_line()
    session = [each for each in psutil.process_iter() if _session(each.pid) == program.pid]
    assert len(session) == 4, "the program, its server, two ranks"
    program.kill_all()
    assert program.poll() == -signal.SIGKILL
    _, alive = psutil.wait_procs(session, timeout=10)
    assert not alive


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


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
