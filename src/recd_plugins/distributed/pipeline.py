"""The training loop: TorchRec's with checks, with overlap, or with lookahead; or a plugin's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PrefetchPipelinedForward
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.distributed.checked_pipeline import CheckedTrainPipeline
from recd_plugins.distributed.guards import (
    check_every_parameter_is_trained,
    check_sharded_as_wholes,
)
from recd_plugins.distributed.lookup_kernels import plan_prefetches, prefetches
from recd_plugins.distributed.overlapped_pipeline import (
    OverlappedTrainPipeline,
    overlaps,
    plan_overlaps,
)
from recd_plugins.errors import ExactnessError, PluginError
from recd_plugins.interfaces import Pipeline, TrainPipeline
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import RunConfig, at_entry

logger = logging.getLogger(__name__)

# Pipelines of TorchRec (1.6 to 1.9) that do not train as a plain loop does.
_INEXACT = {
    "TrainPipelineSemiSync": "looks up the rows of a batch before the step before has updated "
    "them: their gradients are stale, which is another training",
    "EvalPipelineSparseDist": "computes forward passes alone, and trains nothing",
    "EvalPipelineFusedSparseDist": "computes forward passes alone, and trains nothing",
}


class LookaheadTrainPipeline(CheckedTrainPipeline):
    """Caches fetch the rows of batch i+1 while batch i is computed: forward and backward.

    TorchRec's PrefetchTrainPipelineSparseDist with three differences. It runs without CUDA too,
    where TorchRec's fails. The rows of batch i+1 are asked for before the forward pass of batch i
    and not after it, so that they have the whole step to come; for that the ids of a batch travel
    during the backward pass two batches before. And the iterator may change when it ends.

    Batches in flight, when batch i is computed: i; i+1, whose rows come; i+2, whose ids travel.
    """

    # A PrefetchPipelinedForward takes what a ShardedModule.prefetch has seen.
    _pipelined_forward_type = PrefetchPipelinedForward

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches=True,
            context_type=PrefetchTrainPipelineContext,
        )
        self._prefetch_stream = (
            torch.get_device_module(device).Stream() if self._data_dist_stream is not None else None
        )

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Have two batches whose ids travel, where the iterator has as many."""
        while len(self.batches) < 2 and self.enqueue_batch(dataloader_iter):
            batch, context = self.batches[-1], self.contexts[-1]
            if len(self.batches) == 1:
                self._init_pipelined_modules(batch, context, self._pipelined_forward_type)
            else:
                self.start_sparse_data_dist(batch, context)
            self.wait_sparse_data_dist(context)

    def _progress(self, dataloader_iter: Iterator[Any]) -> Any:
        if not self._model_attached:
            self.attach(self._model)
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            raise StopIteration
        self._set_module_context(self.contexts[0])
        if self._model.training:
            self._optimizer.zero_grad()
        self._prefetch(self.contexts[0])
        self._wait_for_prefetch()
        for context in islice(self.contexts, 1, 2):
            self._prefetch(context)
        following = self.enqueue_batch(dataloader_iter)
        if following:
            self.start_sparse_data_dist(self.batches[-1], self.contexts[-1])
        with record_function(f"## forward {self.contexts[0].index} ##"):
            losses, output = self._model_fwd(self.batches[0])
        if following:
            self.wait_sparse_data_dist(self.contexts[-1])
        if self._model.training:
            self._backward(losses)
            with record_function(f"## optimizer {self.contexts[0].index} ##"):
                self._optimizer.step()
        self.dequeue_batch()
        return output

    def _wait_for_prefetch(self) -> None:
        """Order the forward pass of the first batch after what was enqueued for it so far.

        Before the next batch is prefetched, for which it is not to wait.
        """
        if self._prefetch_stream is not None:
            current = torch.get_device_module(self._device).current_stream()
            current.wait_stream(self._prefetch_stream)
            self.batches[0].record_stream(current)

    def _prefetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Take the ids of a batch, and have its rows fetched; nothing where that is done."""
        requests = context.input_dist_tensors_requests
        if not requests:
            return
        device = torch.get_device_module(self._device)
        prefetch_stream = self._prefetch_stream
        forward_stream = None if prefetch_stream is None else device.current_stream()
        with (
            record_function(f"## sharded_module_prefetch {context.index} ##"),
            self._stream_context(prefetch_stream),
        ):
            for module in self._pipelined_modules:
                name = module.forward.name
                with self._stream_context(self._data_dist_stream):
                    ids = requests.pop(name).wait()
                module_context = context.module_contexts.pop(name)
                if prefetch_stream is not None:
                    prefetch_stream.wait_stream(self._data_dist_stream)
                    for stream in (prefetch_stream, forward_stream):
                        ids.record_stream(stream)
                        module_context.record_stream(stream)
                module.prefetch(ctx=module_context, dist_input=ids, forward_stream=forward_stream)
                context.module_input_post_prefetch[name] = ids
                context.module_contexts_post_prefetch[name] = module_context


def build_train_pipeline(
    dmp: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    registry: RunConfig | None = None,
) -> TrainPipeline:
    """A pipeline over ``dmp``: the one that ``registry`` names.

    Without any, one that overlaps input dist and device copies with compute; where a table has a
    cache with lookahead, it overlaps fetching its rows as well (``LookaheadTrainPipeline``).

    Raises:
        ExactnessError: there are parameters that neither the backward pass nor ``optimizer``
            updates, or a module of which only the tables are sharded.
        RegistryError: a plugin makes the pipeline, and it is known to train another way.
        PluginError: a plugin fails or makes something else.
    """
    check_sharded_as_wholes(dmp)
    check_every_parameter_is_trained(dmp, optimizer)
    if registry is not None:
        _say_what_does_not_overlap(dmp, device, registry)
        for entry in registry.entries("pipeline"):
            with at_entry(registry.path, entry):
                return pipeline_of(entry.plugin, dmp, optimizer, device)
    if prefetches(dmp):
        return LookaheadTrainPipeline(dmp, optimizer, device)
    if is_overlapped(dmp, device, registry):
        return OverlappedTrainPipeline(dmp, optimizer, device)
    return CheckedTrainPipeline(dmp, optimizer, device, execute_all_batches=True)


def is_overlapped(dmp: nn.Module, device: torch.device, registry: RunConfig | None) -> bool:
    """Whether the pipeline is one whose ranks send while they compute."""
    if registry is not None and any(registry.entries("pipeline")):
        return False
    asked = None if registry is None else registry.training.overlap
    return not prefetches(dmp) and overlaps(dmp, device, asked)


def will_overlap(prepared: PreparedModel, plan: ShardingPlan, device_type: str, nodes: int) -> bool:
    """The same of a model that is not sharded yet, by its plan for so many nodes."""
    training = prepared.registry.training
    if any(prepared.registry.entries("pipeline")) or not training.overlaps(device_type, nodes):
        return False
    kernels = prepared.lookup_kernels
    modules = [m for m in plan.plan.values() if isinstance(m, EmbeddingModuleShardingPlan)]
    ahead = any(plan_prefetches(module, kernels) for module in modules)
    return not ahead and plan_overlaps(plan, training.overlap)


def _say_what_does_not_overlap(dmp: nn.Module, device: torch.device, registry: RunConfig) -> None:
    """Warn on the first rank where overlap was asked for and there is none."""
    asked = registry.training.overlap
    if not asked or is_overlapped(dmp, device, registry):
        return
    if any(registry.entries("pipeline")):
        why = "the section pipeline says how steps overlap; leave one of the two out"
    elif prefetches(dmp):
        why = "a cache looks ahead, whose pipeline fetches rows; leave one of the two out"
    else:
        why = "no module has only tables whose rows can be looked up ahead; leave it out"
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s: training.overlap is true and does nothing: %s", registry.path, why)


def pipeline_of(
    plugin: Pipeline, dmp: nn.Module, optimizer: Optimizer, device: torch.device
) -> TrainPipeline:
    """What a plugin makes.

    Raises:
        PluginError: it fails, or makes no pipeline.
        ExactnessError: what it makes is known to train another way.
    """
    with plugin_call(plugin, "build"):
        pipeline = plugin.build(dmp, optimizer, device)
    if not callable(getattr(pipeline, "progress", None)):
        raise PluginError(
            f"{plugin.title}: build returned {pipeline!r}; expected a pipeline with a method "
            "progress(dataloader_iter)"
        )
    for base in type(pipeline).__mro__:
        why = _INEXACT.get(base.__name__) if base.__module__.startswith("torchrec.") else None
        if why is not None:
            raise ExactnessError(
                f"{plugin.title}: TorchRec's {base.__name__} {why}; leave out the section "
                "pipeline, or take another"
            )
    return pipeline
