"""What servers import before they fork: a process that has to import it anew takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: What each of these modules is there to import, which nothing in it uses; those before it do not.
PRELOADED = {
    "recd_plugins.data.worker_imports": ("torch", "recd_plugins.data.row_pipeline"),
    "recd_plugins.training.rank_imports": ("recd_plugins.training.trainer",),
    "tests.fork_imports": ("recd_plugins.testing.gloo", "recd_plugins.cli.run"),
}


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """What each of them brought, in one interpreter."""
    program = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    before = set(sys.modules)
    importlib.import_module(name)
    found[name] = sorted(set(sys.modules) - before)
print(json.dumps(found))
"""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", program, *PRELOADED]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", PRELOADED)
def test_the_server_has_it(imported: dict[str, list[str]], module: str) -> None:
    assert set(PRELOADED[module]) <= set(imported[module])
