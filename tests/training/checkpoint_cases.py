"""A small model that is trained and saved, and copies of its checkpoint that are spoiled."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import sharded
from tests.sharded import CPU, bags
from torch import Tensor, nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import TrainingSpec
from recd_plugins.planning.topologies import default_topology
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.training import checkpoint
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import MANIFEST, Progress, digest_of, manifest_text
from recd_plugins.training.optimizer import build_optimizer

TRAINING = TrainingSpec()
#: What a rank calls at each moment of a save.
MOMENTS: dict[str, tuple[Any, str]] = {
    "while tensors are written": (checkpoint, "save"),
    "before the progress is written": (Path, "write_text"),
    "before the rename": (os, "replace"),
    "while an old one is deleted": (shutil, "rmtree"),
}


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment: str) -> None:
    setattr(*MOMENTS[moment], die)


class Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bags = bags("f", rows=rows, name="t")
        self.top = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.top(self.bags(features)["f"]).square().mean()


class Trainer:
    def __init__(self, world_size: int, rows: int = 16) -> None:
        torch.manual_seed(0)
        model, sharders = Model(rows), stock_sharders(TRAINING)
        planner = EmbeddingShardingPlanner(topology=default_topology(world_size))
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        self.dmp = sharded.sharded(model, plan, sharders, CPU)
        self.optimizer = build_optimizer(self.dmp, TRAINING)

    def step(self) -> None:
        features = KeyedJaggedTensor(["f"], torch.arange(6), lengths=torch.tensor([2, 4]))
        self.optimizer.zero_grad()
        self.dmp(features).backward()
        self.optimizer.step()

    def everything(self) -> dict[str, list[float]]:
        return sharded.everything(self.dmp, self.optimizer)


def save_two(rank: int, world_size: int, folder: Path) -> None:
    trainer = Trainer(world_size)
    if rank == 0:
        folder.mkdir(exist_ok=True)
    dist.barrier()
    for step in (1, 2):
        trainer.step()
        progress = Progress(step, losses=[0.5] * step)
        Checkpoints(folder, keep=2).save(trainer.dmp, trainer.optimizer, progress)


def flip(path: Path, place: float = 0.5) -> None:
    """Flip a bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    bit = int(place * len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def change_metadata(checkpoint: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(checkpoint)


def reseal(checkpoint: Path) -> None:
    """A manifest for the files as they are, as someone with bad intent would write it."""
    files = {path.name: digest_of(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(manifest_text(files), encoding="utf-8")
