"""Models sharded on ranks, described."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.distributed.other_module_cases import _bags, _shard, build
from tests.planning.test_planner import prepared, profile, registry
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugins import describe_tables
from recd_plugins.planning.planner import build_planner
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.table_report import TableLine
from recd_plugins.testing.device import DEVICE


class OwnBags(EmbeddingBagCollection):
    pass


def lines(rank: int, world_size: int) -> tuple[list[TableLine], str]:
    """Of a model with a module of every kind."""
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=10 * (i + 1), feature_names=[f"of_{name}"]
        )
        for i, name in enumerate(["b0", "b1", "b2", "copy"])
    ]
    model = nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(tables=configs),
            "sequences": EmbeddingCollection(
                tables=[
                    EmbeddingConfig(
                        name="s", embedding_dim=8, num_embeddings=50, feature_names=["of_s"]
                    )
                ]
            ),
            "processed": build("processed"),
            "own": OwnBags(tables=_bags()),
        }
    )
    apply_optimizer_in_backward(RowWiseAdagrad, model["sequences"].parameters(), {"lr": 0.5})
    ready = prepared(registry(optimizer="sgd"), model)
    sharders = build_sharders(ready, fused_params={"learning_rate": 0.25})
    # The parameters of two modules may share names, as those of processed and own do.
    wishes = {
        name: ParameterConstraints(sharding_types=[kind])
        for name, kind in {
            "b0": "table_wise",
            "b1": "row_wise",
            "b2": "table_wise",
            "copy": "data_parallel",
            "s": "row_wise",
            "t_a": "table_wise",
            "t_b": "table_wise",
        }.items()
    }
    planner = build_planner(
        ready, world_size=world_size, device=DEVICE, profile=profile(), constraints=wishes
    )
    dmp = _shard(model, planner.plan(model, sharders), sharders)
    report = describe_tables(dmp)
    return list(report.lines), str(report)


def of_an_empty_plan(rank: int, world_size: int) -> list[TableLine]:
    """Of a model that the plan forgot, with FBGEMM's own optimizer elsewhere."""
    model = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=_bags())})
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=DEVICE,
        plan=ShardingPlan({}),
    )
    return list(describe_tables(dmp).lines)


def with_params(rank: int, world_size: int, params: dict[str, EmbOptimType]) -> list[str]:
    """Optimizers under fused_params."""
    model = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=_bags())})
    ready = prepared(registry(optimizer="sgd"), model)
    sharders = build_sharders(ready, fused_params=params)
    planner = build_planner(ready, world_size=world_size, device=DEVICE, profile=profile())
    plan = planner.plan(model, sharders)
    return [line.optimizer for line in describe_tables(_shard(model, plan, sharders)).lines]
