"""The input of a linear layer, split into columns of request rows and of batch rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recd_plugins.sparse.request_rows import RequestRows


@dataclass(frozen=True, eq=False)
class SplitInput:
    """The input ``[B, K]`` of a linear layer, split into columns of request rows and batch rows.

    Attributes:
        user: ``[U, K_user]``, the columns ``user_columns`` of the input.
        rows: ``[B, K_rows]``, the columns ``row_columns`` of the input.
    """

    request: RequestRows
    user: Tensor
    rows: Tensor
    user_columns: Tensor
    row_columns: Tensor

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias`` for the whole input ``x``, ``[B, num_outputs]``."""
        of_rows = weight.index_select(1, self.row_columns)
        if not len(self.user_columns):
            return F.linear(self.rows, of_rows, bias)
        of_user = F.linear(self.user, weight.index_select(1, self.user_columns), bias)
        return torch.addmm(self.request.expand(of_user), self.rows, of_rows.t())


def run_linear(layer: Any, inputs: Tensor | SplitInput) -> Tensor:
    """Return the output of an ``nn.Linear``, ``[B, num_outputs]``."""
    if isinstance(inputs, SplitInput):
        return inputs.linear(layer.weight, layer.bias)
    x: Tensor = layer(inputs)
    return x


def run_mlp(mlp: Any, inputs: Tensor | SplitInput) -> Tensor:
    """Return the output of a TorchRec ``MLP``, ``[B, num_outputs]``."""
    x: Tensor
    if isinstance(inputs, Tensor):
        x = mlp(inputs)
    else:
        first, *others = mlp._mlp
        x = first._activation_fn(run_linear(first._linear, inputs))
        for layer in others:
            x = layer(x)
    return x
