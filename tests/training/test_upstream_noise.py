"""What is silenced, and that nothing else is."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging
from recd_plugins.training import upstream_noise
upstream_noise.silence()
logging.warning("Sharding spec not found for bags.t")
logging.warning("something else")
"""


def test_data_parallel_tables_bring_no_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stderr == "WARNING:root:something else\n"
