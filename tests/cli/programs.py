"""`recd` as a process of its own, which may be killed."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from tests import forked
from tests.forked import RECD


def recd(*arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run([RECD, *arguments])


def run_with_plugins(
    registry: Path, *options: object, expect: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run ``recd run`` with the plugins beside the registry file."""
    done = recd("--plugins-dir", registry.parent / "plugins", "run", registry, *options)
    assert done.returncode == expect, done.stderr
    return done


def report_of(*arguments: object) -> dict[str, Any]:
    """What ``--json`` writes; the second of the arguments is the registry file."""
    path = Path(str(arguments[1])).with_name("report.json")
    done = recd(*arguments, "--json", path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8"))


def run_until_killed(registry: Path, checkpoints: Path, *, every: int, steps: int) -> None:
    """``recd run``, killed with all of its ranks after its first checkpoint and before its last."""
    killed = forked.Program([RECD, "run", registry])
    while not (checkpoints / f"step-{every:09}").exists():
        assert killed.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.01)
    killed.kill_all()
    assert not (checkpoints / f"step-{steps:09}").exists(), "it ended before it was killed"
