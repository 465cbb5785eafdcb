"""A train pipeline that leaves parameters untrained is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import TrainingSpec
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.planning.topologies import default_topology
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.runtime.launch import launch
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.training.optimizer import build_optimizer

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config])
        self.top = nn.Linear(4, 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        features = batch.sparse_features
        loss = self.top(self.bags(features)["f"]).square().mean()
        return loss, loss.detach()


def step(rank: int, world_size: int, trained: bool) -> float:
    training = TrainingSpec()
    model = Model()
    sharders = stock_sharders(training)
    planner = EmbeddingShardingPlanner(topology=default_topology(world_size))
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=planner.collective_plan(model, sharders, dist.group.WORLD),
        sharders=sharders,
    )
    optimizer = build_optimizer(dmp, training) if trained else dmp.fused_optimizer
    pipeline = build_train_pipeline(dmp, optimizer, CPU)
    features = KeyedJaggedTensor(["f"], torch.arange(6), lengths=torch.tensor([2, 4]))
    batch = ModelInput(torch.zeros(2, 0), features, torch.zeros(2))
    loss: Tensor = pipeline.progress(iter([batch, replace(batch), replace(batch)]))
    return float(loss)


def test_it_trains() -> None:
    assert launch(step, 2, True)[0] > 0


def test_untrained_parameters_are_an_error() -> None:
    with pytest.raises(ExactnessError, match=r"no optimizer updates .*top\.weight"):
        launch(step, 2, False)
