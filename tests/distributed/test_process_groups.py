"""Groups that the library makes wait as long as the trainer said."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recd_plugin_flexshard.runtime import tier_groups
from recd_plugin_tuning.collectives import node_groups
from recd_plugins.runtime.launch import launch
from recd_plugins.sharding.overlap import DeferredAllReduce

TIMEOUT = timedelta(seconds=77)


def timeouts(rank: int, world_size: int) -> set[timedelta]:
    tiers = tier_groups()
    late = DeferredAllReduce.of(DistributedDataParallel(nn.Linear(1, 1)))
    assert late is not None
    groups = [tiers.cold, tiers.hot, tiers.flex, tiers.flex_gradients, late._group]
    with node_groups() as nodes:
        groups += [nodes.everyone, nodes.node, nodes.across]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return {backend.options._timeout for backend in backends}


def test_the_timeout_of_the_trainer_holds() -> None:
    assert launch(timeouts, 1, timeout=TIMEOUT) == [{TIMEOUT}]


def late_of_some_ranks(rank: int, world_size: int) -> bool:
    groups = [dist.new_group([other]) for other in range(world_size)]
    wrapped = DistributedDataParallel(nn.Linear(1, 1), process_group=groups[rank])
    return DeferredAllReduce.of(wrapped) is not None


def test_ranks_that_train_apart_make_no_groups_without_the_others() -> None:
    assert launch(late_of_some_ranks, 2) == [False, False]
