from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tests.sharded import CPU, everyone
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from recd_plugins.runtime.errors import RankError
from recd_plugins.runtime.launch import launch
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.overlap import DeferredAllReduce
from recd_plugins.testing.fake_cuda import fake_cuda
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.dense_gradients import summed_in_fixed_buckets


class Model(nn.Module):
    """Layers that are registered in another order than they are used in, and one that is not."""

    def __init__(self, *, all_used: bool) -> None:
        super().__init__()
        self.all_used = all_used
        self.extra, self.last, self.first = (nn.Linear(31, 31) for _ in range(3))
        self.first.bias.requires_grad = False

    def forward(self, features: Tensor) -> Tensor:
        out = self.last(self.first(features).relu())
        return (self.extra(out) if self.all_used else out).square().mean()


def sharded(
    always_trained: bool, all_used: bool, device: torch.device = CPU
) -> DistributedModelParallel:
    torch.manual_seed(0)
    return DistributedModelParallel(
        Model(all_used=all_used),
        env=everyone(),
        device=device,
        plan=ShardingPlan({}),
        sharders=[],
        data_parallel_wrapper=summed_in_fixed_buckets(always_trained=always_trained),
    )


def gradients(
    rank: int,
    world_size: int,
    always_trained: bool,
    late: str = "never",
    all_used: bool | None = None,
) -> list[list[float]]:
    all_used = always_trained if all_used is None else all_used
    dmp = sharded(always_trained, all_used)
    assert all(parameter.grad is None for parameter in dmp.parameters())
    waits: DeferredAllReduce | None = None
    if late != "never":
        wrapped = next(dmp.children())
        assert isinstance(wrapped, DistributedDataParallel)
        waits = DeferredAllReduce.of(wrapped)
        assert DeferredAllReduce.of(wrapped) is waits
    torch.manual_seed(rank)
    features = torch.randn(64, 31)
    steps = []
    for _ in range(3):
        dmp.zero_grad()
        loss = dmp(features)
        with waits.later() if waits is not None and late == "late" else nullcontext():
            loss.backward()
        found = [p.grad for p in dmp.parameters() if p.grad is not None]
        assert len(found) == (5 if all_used else 3)
        steps.append(torch.cat([gradient.flatten() for gradient in found]).tolist())
    return steps


@pytest.mark.parametrize("always_trained", [False, True])
def test_all_steps_sum_alike_whoever_may_wait(always_trained: bool) -> None:
    ranks = run_on_ranks(gradients, 3, always_trained)
    first = ranks[0][0]
    assert ranks == [[first, first, first]] * 3
    for late in ("late", "in the backward pass"):
        assert run_on_ranks(gradients, 3, always_trained, late) == ranks


def gradients_without_ddp(rank: int, world_size: int) -> bool:
    torch.manual_seed(0)
    model = Model(all_used=True)
    torch.manual_seed(rank)
    model(torch.randn(64, 31)).backward()
    alone = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert not isinstance(next(sharded(True, True).children()), DistributedDataParallel)
    return gradients(rank, world_size, True)[0] == torch.cat(alone).tolist()


def test_one_rank_trains_without_ddp() -> None:
    assert run_on_ranks(gradients_without_ddp, 1) == [True]


def cuda_gradients(rank: int, world_size: int, all_used: bool) -> list[list[float]]:
    with fake_cuda(rank) as device:
        dmp = sharded(True, all_used, device)
        torch.manual_seed(rank)
        features = torch.randn(64, 31).to(device)
        steps = []
        for _ in range(3):
            dmp.zero_grad()
            for _ in range(2):  # gradients accumulate
                dmp(features).backward()
            found = [p.grad for p in dmp.parameters() if p.grad is not None]
            steps.append(torch.cat([each.flatten() for each in found]).tolist())
        return steps


def test_on_cuda_one_all_reduce_averages_all_gradients() -> None:
    expected = run_on_ranks(gradients, 2, True)[0][0]
    for steps in launch(cuda_gradients, 2, True):
        for step in steps:
            assert step == pytest.approx([2 * each for each in expected], abs=1e-6)
    with pytest.raises(RankError, match="only 3 of 5 dense parameters got a gradient"):
        launch(cuda_gradients, 2, False)


def test_a_parameter_that_is_not_trained_ends_a_run_that_was_promised_it() -> None:
    with pytest.raises(RankError, match="Parameter indices which did not receive grad"):
        run_on_ranks(gradients, 2, True, "never", False)


def gradients_and_bytes(rank: int, world_size: int) -> tuple[list[list[float]], int]:
    with CollectiveBytes() as counter:
        steps = gradients(rank, world_size, False, "late")
    kinds = ((each.kind, each.payload, sent) for each, sent in counter.sent.items())
    return steps, sum(sent for *what, sent in kinds if what == ["all_reduce", "floats"])


def test_a_node_sums_first_and_sends_once() -> None:
    found = launch(gradients_and_bytes, 4, local_world_size=2)
    # Of three steps, the unused layer too; in a ring of two a rank sends all of it.
    size = 3 * 4 * (3 * 31 * 31 + 2 * 31)
    assert [sent for _, sent in found] == [size, 0, size, 0]
    assert all(steps == found[0][0] for steps, _ in found)
    expected = launch(gradients, 4, False, local_world_size=2)[0]
    assert np.abs(np.subtract(found[0][0], expected)).max() < 1e-6
