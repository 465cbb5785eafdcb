"""Sharded modules that could not train compiled run as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recd_plugins.distributed import compiled


class Sharded(nn.Module):
    """It says whether it is compiled."""

    def forward(self, values: Tensor) -> Tensor:
        return values + (1 if torch.compiler.is_compiling() else 0)


@pytest.mark.parametrize(
    ("loses", "device", "runs_compiled"),
    [(True, None, False), (True, "cpu", False), (True, "cuda", True), (False, "cpu", True)],
)
def test_it_is_left_out_where_its_tables_would_not_learn(
    loses: bool, device: str | None, runs_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_LOSES_GRADIENTS", loses)
    on = None if device is None else torch.device(device)
    sharded = compiled.left_uncompiled(Sharded(), on)
    model = torch.compile(nn.Sequential(sharded), backend="eager")
    assert model(torch.zeros(1)).item() == runs_compiled


def test_coalesced_tables_are_left_out() -> None:
    inside = Sharded()
    inside.coalesced_groups = {"a": "b"}  # type: ignore[assignment]
    model = torch.compile(compiled.left_uncompiled(nn.Sequential(inside), None), backend="eager")
    assert not model(torch.zeros(1)).item()
