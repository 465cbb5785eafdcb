"""Sharded modules, which could not train compiled, run as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from recd_plugins.sharding.sharders import left_uncompiled


class Sharded(nn.Module):
    """It says whether it is compiled."""

    def forward(self, values: Tensor) -> Tensor:
        return values + (1 if torch.compiler.is_compiling() else 0)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("left_out", [True, False])
def test_it_is_left_out(left_out: bool) -> None:
    sharded = left_uncompiled(Sharded()) if left_out else Sharded()
    model = torch.compile(nn.Sequential(sharded), backend="eager")
    assert model(torch.zeros(1)).item() == (not left_out)
