"""Learning rates that follow a schedule."""

from __future__ import annotations

import pytest
import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recd_plugins.config.schema import ScheduleSpec
from recd_plugins.training.optimizer import LearningRates, factor


def factors(num_steps: int, /, **schedule: object) -> list[float]:
    spec = ScheduleSpec.model_validate(schedule)
    return [factor(spec, step) for step in range(num_steps)]


def test_factors() -> None:
    assert factors(4) == [1, 1, 1, 1]
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(7, warmup=2, decay="linear", steps=6) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    cosine = factors(5, decay="cosine", steps=3, floor=0.2)
    assert cosine == pytest.approx([1, 0.8, 0.4, 0.2, 0.2])


def test_groups_keep_their_ratio_and_a_loaded_rate_does_not_count() -> None:
    tables, dense = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = CombinedOptimizer(
        [
            KeyedOptimizerWrapper({"tables": tables}, lambda p: torch.optim.SGD(p, lr=0.8)),
            KeyedOptimizerWrapper({"dense": dense}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ]
    )
    rates = LearningRates(optimizer, ScheduleSpec(warmup=2))
    optimizer.param_groups[0]["lr"] = 7.0  # as of a checkpoint
    for step, expected in enumerate([[0.4, 0.05], [0.8, 0.1], [0.8, 0.1]]):
        rates.set(step)
        assert [group["lr"] for group in optimizer.param_groups] == expected
    LearningRates(optimizer, None).set(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.1]
