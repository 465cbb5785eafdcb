"""Exact losses for batches with different numbers of rows on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def weight_losses(model: nn.Module) -> None:
    """Multiply the training loss of each rank by its share of the step's rows.

    The mean over ranks, of losses and of gradients, then is the mean over all rows of the step. The
    ranks sum their numbers of rows in each forward pass.
    """

    def weighted(module: nn.Module, _arguments: Any, output: Any) -> Any:
        if not module.training:
            return output
        loss, (detached, logits, labels) = output
        num_rows = torch.tensor(float(labels.shape[0]), dtype=torch.float64)
        total = num_rows.clone()
        dist.all_reduce(total)
        weight = float(num_rows * dist.get_world_size() / total)
        return loss * weight, (detached * weight, logits, labels)

    model.register_forward_hook(weighted)
