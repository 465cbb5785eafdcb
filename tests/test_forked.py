"""What ``tests.forked`` starts is a process as tests see one, and its ranks are its own."""

from __future__ import annotations

import os
import signal
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
