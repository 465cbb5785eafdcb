"""What servers import before they fork: a process that has to import it anew takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: What each of these modules is there to import, which nothing in it uses.
PRELOADED = {
    "recd_plugins.data.worker_imports": ("torch", "recd_plugins.data.row_pipeline"),
    "recd_plugins.training.rank_imports": ("torchrec", "recd_plugins.training.trainer"),
    "tests.fork_imports": ("torchrec", "recd_plugins.testing.gloo", "recd_plugins.cli.run"),
}


@pytest.mark.parametrize("module", PRELOADED)
def test_the_server_has_it(module: str) -> None:
    code = f"import sys, {module}; print({set(PRELOADED[module])} - sys.modules.keys())"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
