"""Batches of a run: fed to a pipeline that reads ahead, step by step, in segments."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn

from recd_plugins.config import RunConfig
from recd_plugins.data.loader import DataLoader
from recd_plugins.interfaces import TrainPipeline
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.model.build import model_code
from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.data_report import GroupCount

M = TypeVar("M")


class BatchSource:
    """Batches of one run, epoch after epoch, up to a number of steps.

    A pipeline takes batches before it trains on them. A checkpoint holds the position after the
    last batch that was *trained* on, so positions wait here until ``trained`` is called.

    Args:
        loader: at the position of ``start``.
        start: where the run begins.
        epochs: passes over the data, including those before ``start``.
        steps: stop at this step, including those before ``start``; None for no limit.

    Attributes:
        groups: of the batches that were trained on.
    """

    def __init__(
        self,
        loader: DataLoader,
        start: Progress | None = None,
        epochs: int = 1,
        steps: int | None = None,
    ) -> None:
        self._loader = loader
        self._start = start or Progress()
        self._epochs = epochs
        self._steps = steps
        self._waiting: deque[tuple[Progress, Mapping[str, int]]] = deque()
        self.groups = GroupCount()

    @property
    def expected_steps(self) -> int:
        """The step at which the run ends; an estimate if the number of ranks has changed."""
        left = self._loader.num_left()
        if left is None:
            whole = self._epochs * len(self._loader)
        else:
            left += (self._epochs - self._start.epoch - 1) * len(self._loader)
            whole = self._start.step + max(0, left)
        return whole if self._steps is None else min(whole, self._steps)

    @property
    def limit(self) -> str:
        """What ends the run, in words."""
        epochs = f"training.epochs is {self._epochs}"
        return epochs if self._steps is None else f"training.steps is {self._steps}, {epochs}"

    def __iter__(self) -> Iterator[ModelInput]:
        step = self._start.step
        for epoch in range(self._start.epoch, self._epochs):
            for batch in self._loader:
                if self._steps is not None and step >= self._steps:
                    return
                step += 1
                progress = Progress(step, epoch, self._loader.state_dict())
                self._waiting.append((progress, batch.groups))
                yield batch

    def trained(self) -> Progress:
        """Take note that the oldest batch is trained on, and return where the run stands."""
        progress, groups = self._waiting.popleft()
        self.groups.add(groups)
        return progress


def steps(
    pipeline: TrainPipeline, batches: Iterator[Any], registry: RunConfig, model: nn.Module
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield loss, logits and labels of each batch that is trained or evaluated."""
    entry = next(iter(registry.entries("pipeline")), None)
    while True:
        try:
            with (
                model_code(registry, model),
                nullcontext()
                if entry is None
                else plugin_call(entry.plugin, "progress", type(pipeline)),
            ):
                output = pipeline.progress(batches)
        except StopIteration:
            return
        yield output


class _Segment(Iterator[M]):
    """The next few batches."""

    def __init__(self, batches: Iterator[M], count: int) -> None:
        self._batches = batches
        self.left = count

    def __next__(self) -> M:
        if not self.left:
            raise StopIteration
        batch = next(self._batches)
        self.left -= 1
        return batch


def segments(batches: Iterator[M], done: int, every: int | None) -> Iterator[Iterator[M]]:
    """Split batches into segments that end where a run is validated and its pipeline runs dry."""
    if every is None:
        yield batches
        return
    while True:
        segment = _Segment(batches, every - done % every)
        done += segment.left
        yield segment
        if segment.left:
            return
