"""Steps that kernels count in a lookup, which those of CUDA alone learn by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recd_plugins.sharding.overlap import LookupAhead


class Counting(nn.Module):
    """A kernel that counts its steps as FBGEMM's of Adam do, and the step that it learned by."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate_tensor = torch.tensor(0.5)
        self.iter_cpu, self.iter = torch.zeros(1), torch.zeros(1)
        self.learned: list[tuple[float, float]] = []

    def forward(self, features: Tensor) -> Tensor:
        self.iter.add_(1)
        step, rate = float(self.iter_cpu.add_(1)), float(self.learning_rate_tensor)
        rows = features.clone().requires_grad_()
        rows.register_hook(lambda _: self.learned.append((step, rate)))  # type: ignore[no-untyped-call]
        return rows * 1


@pytest.mark.parametrize("rate", [0.5, 0.25])
def test_a_step_is_counted_once_whatever_its_rate(rate: float) -> None:
    kernel = Counting()
    for step in (1, 2, 3):
        ahead: Any = LookupAhead(nn.Sequential(kernel))
        rows = ahead(torch.ones(3))
        # As a checkpoint has it that is written now.
        assert (int(kernel.iter_cpu), int(kernel.iter)) == (step - 1, step - 1)
        kernel.learning_rate_tensor.fill_(rate)
        rows.sum().backward()
        assert kernel.learned[-1] == (step, rate)
        assert (int(kernel.iter_cpu), int(kernel.iter)) == (step, step)
        kernel.learning_rate_tensor.fill_(0.5)
    assert len(kernel.learned) == 3
