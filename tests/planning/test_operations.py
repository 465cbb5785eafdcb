"""Operations of a model's dense layers, counted in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.planning.compute import count_operations
from recd_plugins.planning.step_cost import Operations


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5, bias=False)

    def forward(self, batch: ModelInput) -> tuple[Tensor]:
        x = self.layer(batch.dense_features)
        heads = x.view(2, 1, -1, 5)
        return (F.scaled_dot_product_attention(heads, heads, heads).sum(),)


def test_operations_of_products_and_attention() -> None:
    batch = ModelInput(torch.ones(8, 6), None, torch.ones(8))
    compute = count_operations(Products(), batch)
    assert compute.parameter_bytes == 4 * 30
    # Once forward and once for the gradient of the weight; 2 x 4 x 4 scores of 5 each.
    assert compute.rest.matmul_flops * 8 == 8 * 2 * 2 * 6 * 5 + (2 + 5) * 2 * 2 * 4 * 4 * 5
    assert compute.rest.element_bytes > 0
    # Forward and backward; and Adagrad's of the one parameter.
    assert compute.operators > 6 + 2 * 3
    assert compute.pooling == Operations()
