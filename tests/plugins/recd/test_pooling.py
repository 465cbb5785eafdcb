"""Pooling modules against a loop over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling.attention import AttentionPooling
from recd_plugin_recd.pooling.reductions import MeanPooling
from recd_plugin_recd.pooling.attention_modules import SelfAttention
from recd_plugins.errors import RecdError

DIM = 8


def sequences(lengths: list[int]) -> JaggedTensor:
    values = torch.randn(sum(lengths), DIM, requires_grad=True)
    return JaggedTensor(values, lengths=torch.tensor(lengths, dtype=torch.int32))


def mean(row: Tensor) -> Tensor:
    return row.mean(0)


def test_mean() -> None:
    module = MeanPooling(MeanPooling.Options()).build(DIM)
    check(module, mean)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_is_torchs_own(heads: int) -> None:
    torch.manual_seed(0)
    module = AttentionPooling(AttentionPooling.Options(heads=heads)).build(DIM)
    assert isinstance(module, SelfAttention)
    oracle = nn.MultiheadAttention(DIM, heads, batch_first=True)
    oracle.load_state_dict(
        {
            "in_proj_weight": module.in_projection.weight,
            "in_proj_bias": module.in_projection.bias,
            "out_proj.weight": module.out_projection.weight,
            "out_proj.bias": module.out_projection.bias,
        }
    )
    check(module, lambda row: oracle(row[None], row[None], row[None])[0][0].mean(0))


def check(module: nn.Module, pool_row: Callable[[Tensor], Tensor]) -> None:
    """Values and gradients equal those of each row on its own, zeros for empty rows."""
    for lengths in ([3, 0, 5, 1], [0, 0], [], [4]):
        torch.manual_seed(1)
        jagged = sequences(lengths)
        pooled = module(jagged)
        rows = torch.split(jagged.values(), lengths)
        expected = [pool_row(row) if len(row) else torch.zeros(DIM) for row in rows]
        assert pooled.shape == (len(lengths), DIM)
        weights = torch.randn(len(lengths), DIM)
        if any(lengths):
            torch.testing.assert_close(pooled, torch.stack(expected))
            (wanted,) = torch.autograd.grad(
                (torch.stack(expected) * weights).sum(), jagged.values(), retain_graph=True
            )
            (found,) = torch.autograd.grad((pooled * weights).sum(), jagged.values())
            torch.testing.assert_close(found, wanted)
        else:
            assert not pooled.any()


def test_an_empty_batch_reaches_every_parameter() -> None:
    module = AttentionPooling(AttentionPooling.Options()).build(DIM)
    module(sequences([0, 0])).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_heads_must_divide_the_dimension() -> None:
    with pytest.raises(RecdError, match=r"heads \(3\) must divide .* \(8\)"):
        AttentionPooling(AttentionPooling.Options(heads=3)).build(DIM)
