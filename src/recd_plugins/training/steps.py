"""Steps of a train pipeline, and whose fault it is where one goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from recd_plugins.interfaces import TrainPipeline
from recd_plugins.model.build import model_code
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import RunConfig
from recd_plugins.training.pipeline_promise import PipelinePromise


def steps(
    pipeline: TrainPipeline, batches: Iterator[Any], registry: RunConfig, model: nn.Module
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Loss, logits and labels of each batch, once it is trained, or evaluated.

    Args:
        pipeline: that takes them, some ahead.
        batches: of one split.
        registry: names the plugins that made pipeline and model, if any.
        model: sharded.

    Raises:
        PluginError: their code failed, or the pipeline trained another batch than it returned, one
            twice, or none.
    """
    entry = next(iter(registry.entries("pipeline")), None)
    if entry is None:
        while True:
            try:
                with model_code(registry, model):
                    output = pipeline.progress(batches)
            except StopIteration:
                return
            yield output
    promise = PipelinePromise(entry.plugin, model, batches)
    with promise.watched():
        while True:
            try:
                with (
                    model_code(registry, model),
                    plugin_call(entry.plugin, "progress", type(pipeline)),
                ):
                    output = pipeline.progress(promise)
            except StopIteration:
                break
            promise.check(output)
            yield output
    promise.check_end()
