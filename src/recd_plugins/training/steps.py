"""Steps of a train pipeline, and whose fault it is where one goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Pipeline, TrainPipeline
from recd_plugins.model.build import model_code
from recd_plugins.plugin_call import plugin_code
from recd_plugins.registry import Registry


class _Taken:
    """The same batches, counted."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.count += 1
        return batch


def steps(
    pipeline: TrainPipeline, batches: Iterator[Any], registry: Registry, model: nn.Module
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Loss, logits and labels of each batch, once it is trained, or evaluated.

    Args:
        pipeline: that takes them, some ahead.
        batches: of one split.
        registry: names the plugins that made pipeline and model, if any.
        model: sharded.

    Raises:
        PluginError: their code failed, the pipeline took other batches than it trained, or it
            trained nothing.
    """
    taken, done = _Taken(batches), 0
    before = _writes(model)
    entry = next(iter(registry.entries("pipeline")), None)
    plugin: Pipeline | None = None if entry is None else entry.plugin
    while True:
        own = nullcontext() if plugin is None else plugin_code(plugin, "progress", type(pipeline))
        try:
            with model_code(registry, model), own:
                output = pipeline.progress(taken)
        except StopIteration:
            break
        done += 1
        if plugin is not None:
            _check(plugin, output, done, taken.count)
        yield output
    if plugin is not None and done < taken.count:
        raise PluginError(
            f"{plugin.name}: progress ended with {taken.count - done} of {taken.count} batches "
            "that it had taken and not trained"
        )
    if plugin is not None and done and before is not None and before == _writes(model):
        raise PluginError(
            f"{plugin.name}: progress returned {done} times, and no parameter of the model was "
            "written to: the backward pass, or the step of the optimizer, is missing"
        )


def _writes(model: nn.Module) -> list[int] | None:
    """How often each dense parameter was written to; None where none is trained."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [each._version for each in trained] if model.training and trained else None


def _check(plugin: Pipeline, output: Any, done: int, taken: int) -> None:
    if not (isinstance(output, tuple) and len(output) == 3):
        raise PluginError(
            f"{plugin.name}: progress returned {type(output).__name__}; expected what the model "
            "returned besides its loss"
        )
    if done > taken:
        raise PluginError(
            f"{plugin.name}: progress returned {done} times, and took {taken} batches"
        )
