"""What ranks have to agree on when a module is sharded, whoever made the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D

from recd_plugins.distributed.equal_gradients import sends_once
from recd_plugins.distributed.rank_agreement import check_agreement
from recd_plugins.errors import SetupError
from recd_plugins.versions import installed_set


def check_sharding(
    module: nn.Module,
    shardings: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    fused_params: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> None:
    """Refuse ranks that shard a module differently. A collective call.

    Args:
        module: not sharded.
        shardings: of its tables.
        env: its process group.
        fused_params: of its sharder.
        arguments: of the sharded module, for its name.

    Raises:
        SetupError: plans, optimizers or versions of TorchRec differ, or the sharding is 2D.
    """
    name = arguments.get("module_fqn") or type(module).__name__
    refuse_two_dimensions(name, env)
    decided = {
        "the versions": installed_set(),
        "the plan": shardings,
        # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
        "the optimizers": {
            parameter: {
                attribute: getattr(weight, attribute, None)
                for attribute in ("_optimizer_classes", "_optimizer_kwargs")
            }
            for parameter, weight in module.named_parameters()
        },
        "fused_params": fused_params,
        "whether there are several nodes (LOCAL_WORLD_SIZE)": sends_once(),
    }
    check_agreement(f"sharding {name}", decided, env.process_group)


def refuse_two_dimensions(name: str, env: ShardingEnv) -> None:
    """Refuse a module whose plan is for some ranks, with copies on others.

    Raises:
        SetupError: ``DMPCollection`` shards it.
    """
    if isinstance(env, ShardingEnv2D):
        raise SetupError(
            f"{name} is to be sharded by DMPCollection, over groups of {env.world_size} ranks with "
            "a copy of the tables in each, which these sharders do not know: take "
            "DistributedModelParallel, over all ranks"
        )
