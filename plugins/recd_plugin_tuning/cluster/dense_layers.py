"""What a step of dense layers takes, however small they are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recd_plugin_tuning.cluster.timing import Effort, steps_in_a_row

_ROWS, _WIDTH = 8, 16


def dense_seconds(device: torch.device, effort: Effort) -> float:
    """A step of two layers under DistributedDataParallel, its all-reduce included. Collective.

    What Python, autograd, the wrapper and an optimizer do in each step, beside the few operators.
    """
    # None is drawn: a run whose start this is goes on with the generators as they are.
    layers = nn.Sequential(
        nn.Linear(_WIDTH, _WIDTH, device="meta"), nn.ReLU(), nn.Linear(_WIDTH, 1, device="meta")
    ).to_empty(device=device)
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.01)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adagrad(layers.parameters(), lr=0.01)
    values = torch.ones(_ROWS, _WIDTH, device=device)
    labels = torch.ones(_ROWS, 1, device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(values), labels)
        torch.autograd.backward(loss)
        optimizer.step()

    for _ in range(2):  # DistributedDataParallel makes its buckets anew after the first
        step()
    return steps_in_a_row(step, device, effort)
