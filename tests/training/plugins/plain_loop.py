"""``test.loop``: a train pipeline of a third party, one batch after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from recd_plugins.api import Pipeline, Plugin, TrainPipeline, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


class Loop(Pipeline):
    """A loop in which nothing overlaps."""

    name = "test.loop"

    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        return PlainLoop(model, optimizer, device)


class PlainLoop:
    def __init__(self, model: Any, optimizer: Any, device: Any) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device

    def progress(self, batches: Iterator[Any], /) -> Any:
        batch = next(batches)
        self.optimizer.zero_grad()
        loss, output = self.model(batch.to(self.device))
        if self.model.training:
            loss.backward()
            self.optimizer.step()
        return output


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Loop]
