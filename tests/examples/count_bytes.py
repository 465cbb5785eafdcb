"""Runs a training script and writes what collectives of this rank sent: SCRIPT REPORT."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from recd_plugins.sharding.byte_counter import CollectiveBytes

script, report = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent.resolve()))  # as if it was started itself
with CollectiveBytes() as counter:
    runpy.run_path(script, run_name="__main__")
if os.environ["RANK"] == "0":
    Path(report).write_text(json.dumps(counter.by_kind()))
