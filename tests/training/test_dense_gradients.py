"""Gradients of dense layers are summed in one order from the first step on."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recd_plugins.distributed.byte_counter import CollectiveBytes
from recd_plugins.distributed.late_gradients import LateGradients
from recd_plugins.distributed.launch import launch
from recd_plugins.training.dense_gradients import summed_in_fixed_buckets


class Model(nn.Module):
    """Layers that are registered in another order than they are used in, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.last, self.first = (nn.Linear(31, 31) for _ in range(3))

    def forward(self, features: Tensor) -> Tensor:
        loss: Tensor = self.last(self.first(features).relu()).square().mean()
        return loss


def gradients(rank: int, world_size: int, late: str = "never") -> list[list[float]]:
    torch.manual_seed(0)
    dmp = DistributedModelParallel(
        Model(),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({}),
        sharders=[],
        data_parallel_wrapper=summed_in_fixed_buckets(),
    )
    waits: LateGradients | None = None
    if late != "never":
        wrapped = next(dmp.children())
        assert isinstance(wrapped, DistributedDataParallel)
        waits = LateGradients.of(wrapped)
        assert LateGradients.of(wrapped) is waits
    torch.manual_seed(rank)
    features = torch.randn(64, 31)
    steps = []
    for _ in range(3):
        dmp.zero_grad()
        loss = dmp(features)
        with waits.later() if waits is not None and late == "late" else nullcontext():
            loss.backward()
        found = [p.grad for p in dmp.parameters() if p.grad is not None]
        assert len(found) == 4
        steps.append(torch.cat([gradient.flatten() for gradient in found]).tolist())
    return steps


def test_the_first_step_sums_as_the_later_ones() -> None:
    ranks = launch(gradients, 3)
    assert all(steps == ranks[0] for steps in ranks)
    first, *later = ranks[0]
    assert later == [first, first]


@pytest.mark.parametrize("late", ["late", "in the backward pass"])
def test_summed_by_who_may_wait_they_are_the_same(late: str) -> None:
    assert launch(gradients, 3, late) == launch(gradients, 3)


def gradients_and_bytes(rank: int, world_size: int) -> tuple[list[list[float]], int]:
    with CollectiveBytes() as counter:
        steps = gradients(rank, world_size, "late")
    kinds = ((each.kind, each.payload, sent) for each, sent in counter.sent.items())
    return steps, sum(sent for *what, sent in kinds if what == ["all_reduce", "floats"])


def test_a_node_sums_first_and_sends_once() -> None:
    """All ranks get the same, within rounding of what is summed otherwise."""
    found = launch(gradients_and_bytes, 4, local_world_size=2)
    # Of three steps, the unused layer too; in a ring of two a rank sends all of it.
    size = 3 * 4 * 3 * (31 * 31 + 31)
    assert [sent for _, sent in found] == [size, 0, size, 0]
    assert all(steps == found[0][0] for steps, _ in found)
    expected = launch(gradients, 4, local_world_size=2)[0]
    assert np.abs(np.subtract(found[0][0], expected)).max() < 1e-6
