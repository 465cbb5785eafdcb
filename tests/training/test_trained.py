"""Ranks of torchrun that take a trained model: the same one, or none."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import forked

REGISTRY = """
version: 1
dataset: {use: recd.session_parquet, options: {path: train}}
converter: {use: recd.kjt}
training: {device: cpu}
"""
#: Each rank finds a checkpoint of its own to be the newest.
PROGRAM = """
import os
from pathlib import Path
from recd_plugins.api import load_registry
from recd_plugins.api import TrainedJob, on_ranks

class Job(TrainedJob):
    def prepare(self):
        print("prepares", self.checkpoint.name)

def tell(rank, world_size, job):
    print("scores by", job.checkpoint.name)

path = Path("registry.yaml")
job = Job(path, Path(f"kept/step-00000000{os.environ['RANK']}"))
on_ranks(load_registry(path), tell, job)
"""


def test_all_ranks_take_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    done = forked.torchrun([sys.executable, "-c", PROGRAM], ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = ["prepares step-000000000", *["scores by step-000000000"] * 2]
    assert done.stdout.splitlines() == expected
