"""What a plugin's train pipeline promises: each call is one step of one batch, in their order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Pipeline

# Batches whose values are looked at, as a device waits for that: what is wrong is so at once.
_LOOKED_AT = 4


class PipelinePromise:
    """A look at what a pipeline does to a model, while ``watched``.

    Args:
        plugin: that made the pipeline.
        model: sharded.
        batches: that the pipeline is to take.
    """

    def __init__(self, plugin: Pipeline, model: nn.Module, batches: Iterator[Any]) -> None:
        self._plugin = plugin
        self._model = model
        self._batches = batches
        self._labels: deque[Tensor] = deque()
        self._taken = self._done = self._backwards = 0
        self._steps = Counter[int]()
        self._trains, self._is_at_end = model.training, False
        self._before = self._writes()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_at_end = True
            raise
        self._taken += 1
        if self._taken <= _LOOKED_AT:
            self._labels.append(batch.labels)
        return batch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which backward passes and steps of optimizers are counted."""
        handles = (
            self._model.register_forward_hook(self._after_forward),
            register_optimizer_step_post_hook(self._after_step),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check(self, output: Any) -> None:
        """Look at what ``progress`` returned.

        Raises:
            PluginError: it is of no batch or of another one, or the batch was not trained once.
        """
        if not (isinstance(output, tuple) and len(output) == 3):
            raise self._broken(
                f"returned {type(output).__name__}; expected what the model returned besides its "
                "loss"
            )
        self._done += 1
        if self._trains and not self._model.training:
            raise self._broken(
                f"left the model in evaluation mode in call {self._done}, in which no later batch "
                "would be trained: model.train() is missing"
            )
        if self._done > self._taken:
            raise self._broken(f"returned {self._done} times, and took {self._taken} batches")
        if self._labels and not torch.equal(output[2].cpu(), self._labels.popleft().cpu()):
            raise self._broken(
                f"returned the labels of another batch in call {self._done}: expected the output "
                "of the batch that it trained, in their order"
            )
        if self._backwards > self._done:
            raise self._broken(
                f"made {self._backwards} backward passes in {self._done} calls, each of which "
                "trains one batch: tables learn in each of them"
            )
        most = max(self._steps.values(), default=0)
        if most > self._done:
            raise self._broken(
                f"made {most} steps of an optimizer in {self._done} calls, each of which trains "
                "one batch"
            )

    def check_end(self) -> None:
        """Look at what is left when ``progress`` has ended.

        Raises:
            PluginError: batches that were not trained, or a model that was not.
        """
        if self._done < self._taken:
            raise self._broken(
                f"ended with {self._taken - self._done} of {self._taken} batches that it had taken "
                "and not trained"
            )
        if not self._is_at_end:
            raise self._broken(
                f"ended after {self._done} calls, and batches are left: it raises StopIteration "
                "when there are no more"
            )
        if self._done and self._before is not None and self._before == self._writes():
            raise self._broken(
                f"returned {self._done} times, and no parameter of the model was written to: the "
                "backward pass, or the step of the optimizer, is missing"
            )

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        self._steps[id(optimizer)] += 1

    def _after_forward(self, model: nn.Module, _: Any, output: Any) -> None:
        loss = output[0]
        if model.training and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._at_backward)  # type: ignore[no-untyped-call]

    def _at_backward(self, _: Tensor) -> None:
        self._backwards += 1
        if self._backwards > _LOOKED_AT:
            return
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and parameter.grad.any():
                raise self._broken(
                    f"calls backward where {name} still has the gradient of the batch before: "
                    "optimizer.zero_grad() is missing"
                )

    def _writes(self) -> list[int] | None:
        """How often each dense parameter was written to; None where none is trained."""
        trained = [each for each in self._model.parameters() if each.requires_grad]
        return [each._version for each in trained] if self._model.training and trained else None

    def _broken(self, what: str) -> PluginError:
        return PluginError(f"{self._plugin.title}: progress {what}")
