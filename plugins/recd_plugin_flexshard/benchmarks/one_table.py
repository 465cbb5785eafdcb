"""A model around one table, sharded by rows with tiers or, by TorchRec's own sharder, without."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugin_flexshard.benchmarks.popularity import FEATURE, NUM_DENSE
from recd_plugin_flexshard.benchmarks.trainers import CPU
from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)
from recd_plugins.api import Pooling
from recd_plugins.api.batches import Placement
from recd_plugins.api.distributed import fused_params
from recd_plugins.api.model import DLRM, build_optimizer, table_name
from recd_plugins.api.registry import ModelSpec, TrainingSpec, installed_plugin
from recd_plugins.testing.benchmark import all_gradients_sent

TABLE = table_name(FEATURE)
# Rates that do not amplify rounding: losses are compared.
TRAINING = TrainingSpec(learning_rate=0.02, dense_learning_rate=0.01, eps=1e-3)


def shard(
    num_embeddings: int, embedding_dim: int, tiers: RowTiers | None, retier_every: int | None = None
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The demo model with one sequence feature, from the same weights every time.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: scalars a row.
        tiers: of the table; None shards it by TorchRec's own sharder.
        retier_every: steps after which the rows of the tiers are chosen anew.
    """
    torch.manual_seed(TRAINING.seed)
    model = DLRM(
        ModelSpec(embedding_dim=embedding_dim, num_embeddings=num_embeddings),
        NUM_DENSE,
        Placement(sequence=(FEATURE,)),
    )
    assert model.sequences is not None, "the placement has a sequence"
    assert model.sequence_pooling is not None, "the placement has a sequence"
    model.sequence_pooling.put(FEATURE, _mean())
    params = fused_params(TRAINING)
    sharder: ModuleSharder[torch.nn.Module]
    if tiers is None:
        sharder = EmbeddingCollectionSharder(params)
    else:
        model.sequences = TieredEmbeddingCollection(model.sequences, {TABLE: tiers}, retier_every)
        sharder = TieredEmbeddingCollectionSharder(params)
    plan = construct_module_sharding_plan(
        model.sequences,
        {TABLE: row_wise(compute_kernel="fused")},
        sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=dist.get_world_size(),
        device_type=CPU.type,
    )
    with all_gradients_sent():  # what tiers save is compared with the paper's
        dmp = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan({"sequences": plan}),
            sharders=[sharder],
        )
    return dmp, build_optimizer(dmp, TRAINING)


def _mean() -> Pooling:
    pooling = installed_plugin("pooling", "recd.mean")
    assert isinstance(pooling, Pooling)
    return pooling
