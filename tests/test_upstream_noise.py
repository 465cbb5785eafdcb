"""What is silenced, and that nothing else is."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging
import warnings
from torch.distributed._shard._utils import DEPRECATE_MSG
from recd_plugins.runtime.imports import silence_upstream
silence_upstream()
logging.warning("Sharding spec not found for bags.t")
logging.warning("something else")
warnings.warn(DEPRECATE_MSG, FutureWarning)
warnings.warn("no ShardedTensor", FutureWarning)
renamed = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use `another`"
warnings.warn_explicit(renamed, FutureWarning, "f", 1, module="torch.distributed.c10d_logger")
warnings.warn_explicit("`mine` is deprecated", FutureWarning, "mine.py", 1, module="mine")
"""


def test_tables_and_their_checkpoints_bring_no_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stderr == (
        "WARNING:root:something else\n<string>:10: FutureWarning: no ShardedTensor\n"
        "mine.py:1: FutureWarning: `mine` is deprecated\n"
    )
