"""What is silenced, and that nothing else is."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging
import warnings
from torch.distributed._shard._utils import DEPRECATE_MSG
from recd_plugins import upstream_noise
upstream_noise.silence()
logging.warning("Sharding spec not found for bags.t")
logging.warning("something else")
warnings.warn(DEPRECATE_MSG, FutureWarning)
warnings.warn("no ShardedTensor", FutureWarning)
"""


def test_tables_and_their_checkpoints_bring_no_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stderr == (
        "WARNING:root:something else\n<string>:10: FutureWarning: no ShardedTensor\n"
    )
