"""A trainer made of TorchRec's own parts takes tiers of rows; what the tiers send is told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recd_plugin_flexshard.runtime import ShardedTieredEmbeddingCollection
from recd_plugins import load_registry, prepare
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.breakdown import step_profile
from recd_plugins.values.batch import ModelInput
from recd_plugins.values.stages import StageTimes

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {folder}/table, generate: {{rows: 512, row_group_rows: 64}}}}
converter: {{use: recd.kjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 500}}}}
sharding:
  - use: flexshard.three_tier
    tables: ["t_*"]
    options: {{plan_for: {{topology: zionex-a100-40g, nodes: 2, batch_size: 128}}}}
training: {{batch_size: 16, ranks: 4, ranks_per_node: 2, optimizer: sgd, learning_rate: 0.05}}
"""
FEATURES = ["seq_0_0", "seq_1_0"]
CPU = torch.device("cpu")


class Model(nn.Module):
    """One EmbeddingCollection, means of its sequences, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequences = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"t_{name}", embedding_dim=8, num_embeddings=500, feature_names=[name]
                )
                for name in FEATURES
            ]
        )
        self.top = nn.Linear(8 * len(FEATURES), 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        rows = self.sequences(batch.sequence_features)
        means = [
            torch.segment_reduce(
                rows[name].values(), "mean", lengths=rows[name].lengths(), initial=0
            )
            for name in FEATURES
        ]
        logits = self.top(torch.cat(means, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def train(rank: int, world_size: int, path: Path, sharding: str | None, profiled: bool) -> Any:
    """Losses of a trainer whose optimizer, pipeline and DMP are none of this package's."""
    registry = load_registry(path, sharding=sharding)
    prepared = prepare(registry, Model())
    sharders = prepared.sharders()
    planner = prepared.planner(device=CPU)
    dmp = DistributedModelParallel(
        prepared.model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=planner.collective_plan(prepared.model, sharders, dist.group.WORLD),
        sharders=sharders,
    )
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    pipeline = TrainPipelineSparseDist(dmp, optimizer, CPU)
    batches = iter(prepared.dataloader(rank, world_size))
    losses = []
    with step_profile(warmup=1) as profile:
        for _ in range(5):
            if profiled:
                with profile.step():
                    losses.append(pipeline.progress(batches))
            else:
                losses.append(pipeline.progress(batches))
    tiered = [m for m in dmp.modules() if isinstance(m, ShardedTieredEmbeddingCollection)]
    sizes = [(module.index.num_hot, module.index.num_flex) for module in tiered]
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / world_size).tolist(), sizes, profile.stages() if profiled else None


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    path = folder / "registry.yaml"
    path.write_text(REGISTRY.format(folder=folder), encoding="utf-8")
    load_registry(path).dataset.prepare()
    return path


def test_a_trainer_of_torchrecs_parts_takes_tiers(registry: Path) -> None:
    losses, tiers, _ = run_on_ranks(train, 4, registry, None, False, local_world_size=2)[0]
    assert all(min(sizes) > 0 for sizes in tiers)
    assert len(tiers) == 1
    plain, none, _ = run_on_ranks(
        train, 4, registry, "torchrec.row_wise", False, local_world_size=2
    )[0]
    assert none == []
    assert losses == pytest.approx(plain, abs=1e-6)
    assert losses[0] != pytest.approx(losses[-1], abs=1e-3)


def test_their_time_has_stages(registry: Path) -> None:
    for _, _, stages in run_on_ranks(train, 4, registry, None, True, local_world_size=2):
        assert isinstance(stages, StageTimes)
        assert min(stages.lookup, stages.all_to_all, stages.all_reduce) > 0
