"""Ranks of torchrun that take a trained model: the same one, or none."""

from __future__ import annotations

import re
import subprocess
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
import sys
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
on_ranks(load_registry(path), tell, job, {"--checkpoint": eval(sys.argv[1])})
"""


def told(folder: Path, asked: str) -> subprocess.CompletedProcess[str]:
    (folder / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, asked]
    return forked.torchrun(command, ranks=2, cwd=folder)


def test_all_ranks_take_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    done = told(tmp_path, "'newest'")
    assert done.returncode == 0, done.stderr
    expected = ["prepares step-000000000", *["scores by step-000000000"] * 2]
    assert done.stdout.splitlines() == expected


def test_ranks_that_are_asked_for_other_checkpoints_are_refused(tmp_path: Path) -> None:
    done = told(tmp_path, "os.environ['RANK']")
    assert done.returncode == 1
    said = r'\(starting\): options of the command, --checkpoint: "0" on rank 0, "1" on rank 1\. '
    assert len(re.findall(said, done.stderr)) == 2, done.stderr
    assert not done.stdout
