from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.changed_row_cases import TRAINING, batch, sharded_model
from tests.training import checkpoint_cases
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress, chain_of, checkpoints_in
from recd_plugins.training.optimizer import build_optimizer


class Trainer(checkpoint_cases.Trainer):
    """Trains a model with a table for each kind of sharding, on few rows of each."""

    def __init__(self, rank: int, places: dict[str, str] | None = None) -> None:
        self.rank = rank
        self.dmp = sharded_model(places)
        self.optimizer = build_optimizer(self.dmp, TRAINING)

    def everything(self) -> dict[str, list[float]]:
        """Weights and optimizer state, whole tensors, on every rank."""
        states = {**self.dmp.state_dict()}
        for name, state in self.optimizer.state_dict()["state"].items():
            states.update({f"{name}/{key}": value for key, value in state.items()})
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {name: _parts(each) for name, each in states.items()})
        whole: dict[str, Tensor] = {}
        for name, (size, shards) in (each for of_rank in parts for each in of_rank.items()):
            tensor = whole.setdefault(name, torch.full(size, torch.nan))
            for window, values in shards:
                tensor[window] = values.float()
        return {name: each.flatten().tolist() for name, each in whole.items()}

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.dmp(batch(self.rank, step)).backward()
        self.optimizer.step()


def _parts(value: Any) -> tuple[Any, list[Any]]:
    if not isinstance(value, ShardedTensor):
        value = torch.as_tensor(value).detach()
        return value.size(), [((), value)]
    shards = [(each.metadata, each.tensor.detach()) for each in value.local_shards()]
    return value.size(), [
        (tuple(slice(a, a + n) for a, n in zip(m.shard_offsets, m.shard_sizes, strict=True)), each)
        for m, each in shards
    ]


def train(rank: int, world_size: int, folder: Path, steps: int, full_every: int) -> Any:
    """Load the newest checkpoint, and save one after each step up to ``steps``."""
    trainer = Trainer(rank)
    checkpoints = Checkpoints(folder, keep=2, full_every=full_every)
    done = checkpoints.load(trainer.dmp, trainer.optimizer).step
    states = [trainer.everything()]
    for step in range(done + 1, steps + 1):
        trainer.train(step)
        checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step))
        states.append(trainer.everything())
    return states


@pytest.mark.parametrize("world_size", [1, 2])
def test_deltas_resume_as_full_checkpoints(tmp_path: Path, world_size: int) -> None:
    folder, full = tmp_path / "deltas", tmp_path / "full"
    folder.mkdir(), full.mkdir()
    expected = run_on_ranks(train, world_size, full, 5, 1)[0]
    run_on_ranks(train, world_size, folder, 3, 4)
    assert len(chain_of(checkpoints_in(folder)[-1])) == 3
    resumed = run_on_ranks(train, world_size, folder, 5, 4)[0]
    assert resumed == expected[3:]
    assert [len(chain_of(path)) for path in checkpoints_in(folder)] == [1, 2, 3, 4, 1]
    other = run_on_ranks(train, 3 - world_size, folder, 5, 4)[0]
    assert other[0] == expected[5]
