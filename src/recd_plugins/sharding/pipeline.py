"""Train pipelines based on TorchRec's, with overlapped communication and cache prefetch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import (
    PrefetchTrainPipelineContext,
    TrainPipelineContext,
)
from torchrec.distributed.train_pipeline.runtime_forwards import (
    BaseForward,
    PipelinedForward,
    PrefetchPipelinedForward,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugins.compat.lookup_kernels import prefetches
from recd_plugins.compat.profiler_ranges import record_function, replace_ranges_of_torchrec
from recd_plugins.config import RunConfig, at_entry
from recd_plugins.interfaces import TrainPipeline
from recd_plugins.interfaces.model_tables import outermost_sharded
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.runtime.rank_agreement import crosses_links
from recd_plugins.sharding.byte_counter import tracker_of
from recd_plugins.sharding.exact_modules import (
    ExactShardedEmbeddingBagCollection,
    ExactShardedEmbeddingCollection,
)
from recd_plugins.sharding.guards import (
    check_every_parameter_is_trained,
    check_sharded_as_wholes,
)
from recd_plugins.sharding.overlap import DeferredAllReduce, LookupAhead
from recd_plugins.sharding.size_exchange import exchange_sizes_once, send_sizes

logger = logging.getLogger(__name__)

_EXACT = (ExactShardedEmbeddingBagCollection, ExactShardedEmbeddingCollection)
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


class SparseDistTrainPipeline(TrainPipelineSparseDist):
    """TorchRec's TrainPipelineSparseDist, without CUDA streams on CPU.

    Ranks exchange the sizes of all modules' id tensors in one message, and all ids in another one.
    On CPU, models with TorchRec's own sharders keep TorchRec's input dist.
    """

    _pipelined_forward_type: type[BaseForward[Any]] = PipelinedForward

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, **arguments: Any
    ) -> None:
        super().__init__(model, optimizer, device, **arguments)
        replace_ranges_of_torchrec()
        if device.type == "cpu":
            # TorchRec (1.6 to 1.9) enters CUDA streams here, which initializes CUDA even for CPU
            # training.
            self._stream_context = nullcontext
            forward = self._pipelined_forward_type
            self._pipelined_forward_type = type(
                forward.__name__, (forward,), {"_use_main_stream_for_dist_init": True}
            )

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Attach as the base class does, and preserve the received ids of batches in flight.

        TorchRec (1.6 to 1.9) sends the ids of the first batch again without waiting for them. The
        model then lacks the batch sizes of the other ranks.
        """
        super().attach(model, sparse_dist and not self._pipelined_modules)

    def _pipeline_model(self, *arguments: Any, **named: Any) -> None:
        super()._pipeline_model(*arguments, **named)
        parts = chain.from_iterable(module.modules() for module in self._pipelined_modules)
        if self._device.type != "cpu" or any(isinstance(part, _EXACT) for part in parts):
            exchange_sizes_once(self._pipelined_modules)

    def start_sparse_data_dist(self, batch: Any, context: TrainPipelineContext) -> None:
        """Start the input dist of a batch, and send the sizes of its ids."""
        super().start_sparse_data_dist(batch, context)
        with self._stream_context(self._data_dist_stream):
            send_sizes(context.input_dist_splits_requests.values())


class LookaheadTrainPipeline(SparseDistTrainPipeline):
    """Prefetches the rows of batch i+1 into caches during forward and backward of batch i.

    Unlike TorchRec's PrefetchTrainPipelineSparseDist, it runs without CUDA, requests rows before
    the forward pass of the previous batch, and accepts a new iterator when one ends. While batch i
    is computed, the rows of batch i+1 and the ids of batch i+2 are in flight.
    """

    # PrefetchPipelinedForward reads what ShardedModule.prefetch stored.
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
        """Send the ids of the first two batches, or of the first if there is only one."""
        while len(self.batches) < 2 and self.enqueue_batch(dataloader_iter):
            batch, context = self.batches[-1], self.contexts[-1]
            if len(self.batches) == 1:
                self._init_pipelined_modules(batch, context, self._pipelined_forward_type)
            else:
                self.start_sparse_data_dist(batch, context)
            self.wait_sparse_data_dist(context)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on one batch, and return the model's output."""
        if not self._model_attached:
            self.attach(self._model)
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            raise StopIteration
        self._set_module_context(self.contexts[0])
        if self._model.training:
            self._optimizer.zero_grad()
        self._prefetch(self.contexts[0])
        if self._prefetch_stream is not None:  # do not wait for the prefetch of the next batch
            current = torch.get_device_module(self._device).current_stream()
            current.wait_stream(self._prefetch_stream)
            self.batches[0].record_stream(current)
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

    def _prefetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Receive the ids of a batch and fetch its rows, unless this was already done."""
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


@dataclass
class _RowsAheadContext(TrainPipelineContext):
    """Pipeline context that stores a batch's ids and the pending rows per module."""

    has_sizes: bool = False
    rows: dict[str, Awaitable[Any]] = field(default_factory=dict)


class _RowsAhead(PipelinedForward):
    """Forward function that returns prefetched rows, or looks rows up if none were prefetched."""

    def look_up(self, context: _RowsAheadContext) -> None:
        now = self.get_context()
        self.set_context(context)
        with _before_the_step(self._module):
            context.rows[self.name] = super().__call__()
        self.set_context(now)

    def __call__(self, *input: Any, **kwargs: Any) -> Awaitable[Any]:
        context = self.get_context()
        assert isinstance(context, _RowsAheadContext)
        if self.name in context.rows:
            rows = context.rows.pop(self.name)
            # Without gradients the tables must not be updated.
            return rows if torch.is_grad_enabled() else LazyNoWait(_detached(rows.wait()))
        return super().__call__(*input, **kwargs)


def _detached(rows: Any) -> KeyedTensor | dict[str, JaggedTensor]:
    """Return a module's output detached from the autograd graph."""
    if isinstance(rows, KeyedTensor):
        return KeyedTensor(rows.keys(), rows.length_per_key(), rows.values().detach())
    return {
        name: JaggedTensor(
            each.values().detach(), weights=each.weights_or_none(), lengths=each.lengths()
        )
        for name, each in rows.items()
    }


class _LateCopies(LazyAwaitable[Tensor]):
    """Awaitable that looks up rows of data-parallel tables only in ``wait``."""

    def __init__(self, lookup: nn.Module) -> None:
        super().__init__()
        self._lookup = lookup
        self._features: Any = None
        self._columns: list[int] = []

    def look_up(self, features: Any) -> Tensor:
        """Store the features for the lookup in ``wait``; replaces the module's lookup."""
        self._features = features
        return torch.empty(0)

    def sent(self, rows: Tensor, _context: Any = None) -> Awaitable[Tensor]:
        """Return an awaitable without sending data; replaces the module's output dist."""
        self._columns = list(rows.shape[1:])  # a module without pooling has given it some
        return self

    def _wait_impl(self) -> Tensor:
        rows: Tensor = self._lookup(self._features)
        return rows.view(-1, *self._columns) if self._columns else rows


@contextmanager
def _before_the_step(module: Any) -> Iterator[None]:
    """Let ``module`` look up rows before the optimizer step, except for data-parallel tables."""
    own = vars(module)  # plain attributes: nn.Module.__setattr__ is slow for lists
    lookups, dists = own["_lookups"], own["_output_dists"]
    late = {n: _LateCopies(each) for n, each in enumerate(lookups) if _is_replicated(each)}
    own["_lookups"] = [
        late[n].look_up if n in late else LookupAhead(each) for n, each in enumerate(lookups)
    ]
    own["_output_dists"] = [late[n].sent if n in late else each for n, each in enumerate(dists)]
    try:
        yield
    finally:
        own["_lookups"], own["_output_dists"] = lookups, dists


def _is_replicated(lookup: nn.Module) -> bool:
    return isinstance(lookup, DistributedDataParallel)


class OverlappedTrainPipeline(SparseDistTrainPipeline):
    """A SparseDistTrainPipeline that overlaps communication with compute.

    The all-reduce of dense gradients overlaps with the update of the tables and with the lookup of
    the next batch. The ids of batch i+2 are sent during the forward and backward pass of batch i+1.
    Losses are bit-identical.

    Between two calls of ``progress``, rows of the next batch are already looked up. Calling
    ``load_state_dict`` then raises ExactnessError.
    """

    _pipelined_forward_type = _RowsAhead

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        super().__init__(
            model, optimizer, device, execute_all_batches=True, context_type=_RowsAheadContext
        )
        self._deferred: DeferredAllReduce | None = None
        sharded = [module for _, module in outermost_sharded(model)]
        self._is_ahead = all(map(_looks_up_ahead, sharded))
        # A weak reference: only a live pipeline can still finish its batches.
        refuse_loading = WeakMethod(self._refuse_loading)

        def loaded(module: nn.Module, keys: Any) -> None:
            if (refuse := refuse_loading()) is not None:
                refuse(module, keys)

        for module in _ahead(sharded):
            finalize(self, module.register_load_state_dict_post_hook(loaded).remove)
        for child in model.children():
            # Otherwise gradients would be copied from the buckets before they are reduced.
            if isinstance(child, DistributedDataParallel) and child.gradient_as_bucket_view:
                self._deferred = deferred = DeferredAllReduce.of(child)
                # The module that is looked up first is updated last.
                for module in _ahead(sharded)[:1]:
                    for lookup in module._lookups:
                        if deferred is not None and not _is_replicated(lookup):
                            deferred.start_after(lookup)

    def start_sparse_data_dist(self, batch: Any, context: TrainPipelineContext) -> None:
        """Send the number of ids in the first call for a batch, and the ids in the second call."""
        assert isinstance(context, _RowsAheadContext)
        if context.has_sizes:
            self.wait_sparse_data_dist(context)
        else:
            super().start_sparse_data_dist(batch, context)
            context.has_sizes = True

    def _refuse_loading(self, module: nn.Module, _: Any) -> None:
        if any(isinstance(each, _RowsAheadContext) and each.rows for each in self.contexts):
            raise ExactnessError(
                f"a {type(module).__name__} loaded weights while rows of the next batch were "
                "already looked up. Finish all batches or call reset() on the pipeline first, or "
                "set training.overlap: false."
            )

    def _backward(self, losses: Tensor) -> None:
        with nullcontext() if self._deferred is None else self._deferred.later():
            super()._backward(losses)
            if self._deferred is not None:
                self._deferred.start()
            if len(self.batches) > 1:
                self._look_up(self.contexts[1])
            if len(self.batches) > 2 and self._is_ahead:
                self.start_sparse_data_dist(self.batches[2], self.contexts[2])
            if len(self.batches) > 1:
                self._take(self.contexts[1])

    def _look_up(self, context: TrainPipelineContext) -> None:
        with record_function(f"## look_up {context.index} ##"):
            for module in _ahead(self._pipelined_modules):
                module.forward.look_up(context)

    def _take(self, context: TrainPipelineContext) -> None:
        """Compute the module outputs from prefetched rows while gradients are being reduced."""
        assert isinstance(context, _RowsAheadContext)
        with record_function(f"## take {context.index} ##"):
            for module in _ahead(self._pipelined_modules):
                if not any(map(_is_replicated, module._lookups)):
                    name = module.forward.name
                    context.rows[name] = LazyNoWait(context.rows[name].wait())


def build_train_pipeline(
    dmp: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    registry: RunConfig | None = None,
) -> TrainPipeline:
    """Return the train pipeline for ``dmp``: the one set in ``registry``, or else the default.

    The default overlaps input dist and device copies with compute. If a table has a cache with
    lookahead, it also prefetches rows into the cache (``LookaheadTrainPipeline``).

    Raises:
        ExactnessError: a parameter is updated by neither the backward pass nor ``optimizer``, or
            only the tables of a module are sharded.
    """
    check_sharded_as_wholes(dmp)
    check_every_parameter_is_trained(dmp, optimizer)
    entries = () if registry is None else tuple(registry.entries("pipeline"))
    asked = None if registry is None else registry.training.overlap
    ahead = prefetches(dmp)
    overlapped = not entries and not ahead and overlaps(dmp, device, asked)
    if registry is not None:
        if registry.training.overlap and not overlapped:
            logger.warning(
                "%s: training.overlap has no effect with a pipeline: entry, with a cache that "
                "prefetches, or if no module has only fused kernels. Remove training.overlap.",
                registry.path,
            )
        for entry in entries:
            with at_entry(registry.path, entry), plugin_call(entry.plugin, "build"):
                pipeline: TrainPipeline = entry.plugin.build(dmp, optimizer, device)
                return pipeline
    if ahead:
        return LookaheadTrainPipeline(dmp, optimizer, device)
    if overlapped:
        return OverlappedTrainPipeline(dmp, optimizer, device)
    return SparseDistTrainPipeline(dmp, optimizer, device, execute_all_batches=True)


def overlaps(model: nn.Module, device: torch.device, asked: bool | None) -> bool:
    """Return True if the train pipeline should overlap communication with compute.

    ``asked`` is the user's setting; None means True for CPU training on several nodes. Return False
    if no module can look up rows of the next batch early.
    """
    if asked is False or not dist.is_initialized() or isinstance(model, DMPCollection):
        return False
    ahead = _ahead([module for _, module in outermost_sharded(model)])
    if asked or not ahead:
        return bool(ahead)
    plans = [module.module_sharding_plan.values() for module in ahead]
    sends = any(each.sharding_type != _DATA_PARALLEL for plan in plans for each in plan)
    return device.type == "cpu" and crosses_links() and sends


def _ahead(modules: Sequence[Any]) -> list[Any]:
    """Return the modules that can look up rows early, sequence modules first."""
    chosen = [module for module in modules if _looks_up_ahead(module)]
    return sorted(chosen, key=lambda module: isinstance(module, ExactShardedEmbeddingBagCollection))


def _looks_up_ahead(module: Any) -> bool:
    """Return True if rows of the next batch are final after the current backward pass.

    Kernels that are not fused may change rows in the optimizer step. A registered lookup tracker
    (``post_lookup_tracker_fn``) would see the lookup one step too early.
    """
    return (
        isinstance(module, (ExactShardedEmbeddingBagCollection, ExactShardedEmbeddingCollection))
        and module.looks_up_ahead
        and tracker_of(module) is None
        and all(
            sharding.compute_kernel == EmbeddingComputeKernel.FUSED.value
            or sharding.sharding_type == _DATA_PARALLEL
            for sharding in module.module_sharding_plan.values()
        )
    )
