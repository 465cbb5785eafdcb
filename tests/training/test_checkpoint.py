"""Checkpoints survive a kill at any moment, and load on another number of ranks."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed import stock_sharders
from recd_plugins.distributed.launch import launch
from recd_plugins.errors import RecdError, SetupError
from recd_plugins.planning import default_topology
from recd_plugins.registry import TrainingSpec
from recd_plugins.training import checkpoint
from recd_plugins.training.checkpoint import Checkpoints, Progress
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.weights import copy_weights

TRAINING = TrainingSpec()


class Model(nn.Module):
    """One table, one dense layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config])
        self.top = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        loss: Tensor = self.top(self.bags(features)["f"]).square().mean()
        return loss


class Trainer:
    def __init__(self, world_size: int, rows: int = 16) -> None:
        from torchrec.distributed.planner import EmbeddingShardingPlanner

        torch.manual_seed(0)
        model = Model(rows)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sharders = stock_sharders(TRAINING)
        planner = EmbeddingShardingPlanner(topology=default_topology(world_size))
        self.dmp = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=planner.collective_plan(model, sharders, dist.group.WORLD),
            sharders=sharders,
        )
        copy_weights(self.dmp.state_dict(), weights)
        self.optimizer = build_optimizer(self.dmp, TRAINING)

    def step(self) -> None:
        features = KeyedJaggedTensor(["f"], torch.arange(6), lengths=torch.tensor([2, 4]))
        self.optimizer.zero_grad()
        self.dmp(features).backward()
        self.optimizer.step()

    def everything(self) -> dict[str, list[float]]:
        """Weights and optimizer state, whole tensors, on every rank."""
        states = {**self.dmp.state_dict()}
        for name, state in self.optimizer.state_dict()["state"].items():
            states.update({f"{name}/{key}": value for key, value in state.items()})
        return {name: _whole(value).flatten().tolist() for name, value in states.items()}


def _whole(value: Any) -> Tensor:
    if not isinstance(value, ShardedTensor):
        return torch.as_tensor(value).detach().clone()
    whole = torch.zeros(value.metadata().size)
    for shard in value.local_shards():
        sizes = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        whole[tuple(slice(o, o + size) for o, size in sizes)] = shard.tensor.detach()
    dist.all_reduce(whole)
    return whole


def save_three(rank: int, world_size: int, folder: Path, die_at: str | None) -> Any:
    """Checkpoints after steps 1 to 3, dying in the one of step 3."""
    checkpoints = Checkpoints(folder, keep=1)
    if rank == 0:
        checkpoints.prepare(resume=False)
    dist.barrier()
    trainer = Trainer(world_size)
    states = []
    for step in range(1, 4):
        trainer.step()
        states.append(trainer.everything())
        if step == 3 and die_at is not None and rank == 0:
            _die_at(die_at)
        checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step, losses=[0.0] * step))
    return states


def _die_at(moment: str) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "while tensors are written":
        checkpoint.save = die
    elif moment == "before progress is written":
        Path.write_text = die  # type: ignore[method-assign]
    elif moment == "before the rename":
        os.replace = die  # type: ignore[assignment]
    elif moment == "while an old one is deleted":
        shutil.rmtree = die  # type: ignore[assignment]


def load(rank: int, world_size: int, folder: Path) -> Any:
    trainer = Trainer(world_size)
    progress = Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)
    return progress, trainer.everything()


MOMENTS = {
    "while tensors are written": 2,
    "before progress is written": 2,
    "before the rename": 2,
    "while an old one is deleted": 3,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the checkpoint of step 3, and the state after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, launch(save_three, 2, folder, None)[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_a_whole_checkpoint(
    tmp_path: Path, whole: tuple[Path, Any], moment: str
) -> None:
    with pytest.raises(SetupError, match="killed"):
        launch(save_three, 2, tmp_path, moment)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.prepare(resume=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{MOMENTS[moment]:09d}"]
    for progress, state in launch(load, 2, tmp_path):
        assert progress.step == MOMENTS[moment]
        assert state == whole[1][progress.step - 1]


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks(whole: tuple[Path, Any], world_size: int) -> None:
    folder, states = whole
    assert states[2] != states[1]
    for progress, state in launch(load, world_size, folder):
        assert progress.step == 3
        assert state == states[2]


def load_into_a_larger_table(rank: int, world_size: int, folder: Path) -> None:
    trainer = Trainer(world_size, rows=32)
    Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)


def test_a_checkpoint_of_another_model(whole: tuple[Path, Any]) -> None:
    with pytest.raises(RecdError, match=r"step-000000003: cannot be loaded .* registry"):
        launch(load_into_a_larger_table, 1, whole[0])


def test_a_damaged_checkpoint(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(whole[0], damaged)
    (damaged / "step-000000003" / "progress.json").write_text("{", encoding="utf-8")
    with pytest.raises(RecdError, match="step-000000003: cannot be loaded"):
        launch(load, 1, damaged)


def test_a_folder_in_use_or_not_to_be_written(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    with pytest.raises(RecdError, match="--resume"):
        Checkpoints(whole[0], keep=1).prepare(resume=False)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RecdError, match=r"file: cannot be written .*training.checkpoint.path"):
        Checkpoints(tmp_path / "file", keep=1).prepare(resume=False)
