"""``test.loop``: a train pipeline of a third party, one batch after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from recd_plugins.api import Pipeline, Plugin, PluginOptions, TrainPipeline, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


class Loop(Pipeline):
    """A loop in which nothing overlaps."""

    name = "test.loop"

    class Options(PluginOptions):
        fault: str = ""

    options: Options

    def build(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainPipeline:
        """Return a loop, or fail."""
        if self.options.fault == "fails":
            raise ValueError("no streams")
        return PlainLoop(model, optimizer, device, self.options.fault)


class PlainLoop:
    """Steps one after the other, with a fault."""

    def __init__(self, model: Any, optimizer: Any, device: Any, fault: str) -> None:
        self.model, self.optimizer, self.device, self.fault = model, optimizer, device, fault

    def progress(self, batches: Iterator[Any], /) -> Any:
        """Train or evaluate a batch."""
        batch = next(batches)
        if self.fault == "breaks":
            raise ValueError("no batch")
        self.optimizer.zero_grad()
        loss, output = self.model(batch.to(self.device))
        if self.model.training:
            loss.backward()
            self.optimizer.step()
        return output


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Loop]
