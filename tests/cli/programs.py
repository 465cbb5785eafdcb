"""`recd` as a process of its own, which may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECD = str(Path(sys.executable).with_name("recd"))


def recd(
    *arguments: object, program: tuple[str, ...] = (RECD,)
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )


def report_of(*arguments: object, program: tuple[str, ...] = (RECD,)) -> dict[str, Any]:
    """What ``--json`` writes; the second of the arguments is the registry file."""
    path = Path(str(arguments[1])).with_name("report.json")
    done = recd(*arguments, "--json", path, program=program)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def run_until_killed(registry: Path, checkpoints: Path, *, every: int, steps: int) -> None:
    """``recd run``, killed with all of its ranks after its first checkpoint and before its last.

    Args:
        registry: file to run.
        checkpoints: the folder that it writes them to.
        every: steps between them.
        steps: of the whole run.
    """
    killed = subprocess.Popen(
        [RECD, "run", str(registry)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (checkpoints / f"step-{every:09}").exists():
        assert killed.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (checkpoints / f"step-{steps:09}").exists(), "it ended before it was killed"
