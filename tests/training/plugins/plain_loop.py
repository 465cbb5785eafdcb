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
        """A loop, or what ``fault`` says."""
        fault: Any = self.options.fault
        if fault == "is_stale":
            from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

            fault = TrainPipelineSemiSync(model, optimizer, device)
        if fault == "builds_nothing":
            fault = None
        if fault == "fails":
            raise ValueError("no streams")
        known = isinstance(fault, str)
        return PlainLoop(model, optimizer, device, fault) if known else fault


class PlainLoop:
    """Steps one after the other, with a fault."""

    def __init__(self, model: Any, optimizer: Any, device: Any, fault: str) -> None:
        self.model, self.optimizer, self.device, self.fault = model, optimizer, device, fault
        self.outputs: list[Any] = []
        self.ended = False

    def progress(self, batches: Iterator[Any], /) -> Any:
        """A step."""
        if self.fault == "stops_early" and self.outputs:
            raise StopIteration
        batch = next(batches, None)
        if batch is None or (self.fault == "ends_once" and self.ended):
            self.ended = True
            raise StopIteration
        if self.fault == "skips":
            next(batches, None)
        if self.fault == "breaks":
            raise ValueError("no batch")
        if self.fault not in ("adds_up_gradients", "zeroes_late"):
            self.optimizer.zero_grad()
        loss, output = self.model(batch.to(self.device))
        if self.model.training or self.fault == "always_trains":
            loss.backward()
            if self.fault != "trains_nothing":
                self.optimizer.step()
            if self.fault == "zeroes_late":
                self.optimizer.zero_grad()
            if self.fault == "steps_twice":
                self.optimizer.step()
        if self.fault == "trains_twice":
            self.optimizer.zero_grad()
            self.model(batch)[0].backward()
        self.outputs.append(output)
        if self.fault == "evaluates":
            self.model.eval()
        if self.fault == "gives_the_loss":
            return output[0]
        return self.outputs[-2:][0] if self.fault == "is_one_behind" else output


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Loop]
