"""Groups that the library makes wait as long as the trainer said."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recd_plugin_calibration.cluster.groups import node_groups
from recd_plugin_flexshard.runtime import tier_groups
from recd_plugins.distributed.late_gradients import LateGradients
from recd_plugins.distributed.launch import launch

TIMEOUT = timedelta(seconds=77)


def timeouts(rank: int, world_size: int) -> set[timedelta]:
    tiers = tier_groups()
    late = LateGradients.of(DistributedDataParallel(nn.Linear(1, 1)))
    assert late is not None
    groups = [tiers.cold, tiers.hot, tiers.flex, tiers.flex_gradients, late._group]
    with node_groups() as nodes:
        groups += [nodes.everyone, nodes.beside, nodes.node, nodes.across]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return {backend.options._timeout for backend in backends}


def test_the_timeout_of_the_trainer_holds() -> None:
    assert launch(timeouts, 1, timeout=TIMEOUT) == [{TIMEOUT}]
