"""A training loop whose ranks send while they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    LazyNoWait,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugins.distributed.byte_counter import tracker_of
from recd_plugins.distributed.checked_pipeline import CheckedTrainPipeline
from recd_plugins.distributed.joined_ids import JoinedIds
from recd_plugins.distributed.late_gradients import LateGradients
from recd_plugins.distributed.rank_agreement import crosses_links
from recd_plugins.distributed.rates_of_steps import LookupAhead
from recd_plugins.distributed.sharded_bags import ExactShardedEmbeddingBagCollection
from recd_plugins.distributed.sharded_sequences import ExactShardedEmbeddingCollection
from recd_plugins.distributed.table_report import outermost_sharded
from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.errors import ExactnessError


@dataclass
class _RowsAheadContext(TrainPipelineContext):
    """Also how far the ids of the batch are, and its rows, by module, that are on their way."""

    has_sizes: bool = False
    rows: dict[str, Awaitable[Any]] = field(default_factory=dict)


class _RowsAhead(PipelinedForward):
    """Takes the rows that were looked up ahead; those of other modules are looked up now."""

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
            # Where the model looks up without gradients, its tables are not to learn.
            return rows if torch.is_grad_enabled() else LazyNoWait(_detached(rows.wait()))
        return super().__call__(*input, **kwargs)


def _detached(rows: Any) -> KeyedTensor | dict[str, JaggedTensor]:
    """What comes out of a module, of which no table learns."""
    if isinstance(rows, KeyedTensor):
        return KeyedTensor(rows.keys(), rows.length_per_key(), rows.values().detach())
    return {
        name: JaggedTensor(
            each.values().detach(), weights=each.weights_or_none(), lengths=each.lengths()
        )
        for name, each in rows.items()
    }


class _LateCopies(LazyAwaitable[Tensor]):
    """Rows of data-parallel tables, read when they are waited for.

    Args:
        lookup: of the tables.
    """

    def __init__(self, lookup: nn.Module) -> None:
        super().__init__()
        self._lookup = lookup
        self._features: Any = None
        self._columns: list[int] = []

    def look_up(self, features: Any) -> Tensor:
        """In place of the lookup: keep what to read."""
        self._features = features
        return torch.empty(0)

    def sent(self, rows: Tensor, _context: Any = None) -> Awaitable[Tensor]:
        """In place of the output dist, which sends nothing of such tables."""
        self._columns = list(rows.shape[1:])  # a module without pooling has given it some
        return self

    def _wait_impl(self) -> Tensor:
        rows: Tensor = self._lookup(self._features)
        return rows.view(-1, *self._columns) if self._columns else rows


@contextmanager
def _before_the_step(module: Any) -> Iterator[None]:
    """While it is open, the module looks up what another step is for.

    Data-parallel tables learn in the optimizer's step, and are read later; the others learn by the
    rates of that step.
    """
    require_attributes(module, "_lookups", "_output_dists")  # torchrec 1.6 to 1.9
    own = vars(module)  # of lists, which an assignment to a module takes long to look at
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


class OverlappedTrainPipeline(CheckedTrainPipeline):
    """A CheckedTrainPipeline that has something on its way while ranks compute.

    Tables have learned when the backward pass is over, and gradients of dense layers are wanted in
    the optimizer's step alone: these are summed while tables learn, and while rows of the next
    batch are looked up and sent. Ids of the batch after it travel during its forward and backward
    pass. What is computed and the order in which it is summed are the same: so are losses, bit for
    bit.

    Rows of the next batch are on their way between two calls of ``progress``: weights of tables
    that are set there come too late for that batch. ``load_state_dict`` raises ExactnessError then.
    """

    _pipelined_forward_type = _RowsAhead

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        super().__init__(
            model, optimizer, device, execute_all_batches=True, context_type=_RowsAheadContext
        )
        self._late: LateGradients | None = None
        sharded = [module for _, module in outermost_sharded(model)]
        self._is_ahead = all(map(_looks_up_ahead, sharded))
        # Of a pipeline that is there: who has let go of one cannot train its batches to the end.
        refuse_loading = WeakMethod(self._refuse_loading)

        def loaded(module: nn.Module, keys: Any) -> None:
            if (refuse := refuse_loading()) is not None:
                refuse(module, keys)

        for module in _ahead(sharded):
            finalize(self, module.register_load_state_dict_post_hook(loaded).remove)
        for child in model.children():
            # Else gradients are copied from the buckets before they are summed.
            if isinstance(child, DistributedDataParallel) and child.gradient_as_bucket_view:
                self._late = late = LateGradients.of(child)
                # The first to be looked up is the last that learns.
                for module in _ahead(sharded)[:1]:
                    require_attributes(module, "_lookups")  # torchrec 1.6 to 1.9
                    for lookup in cast(Iterable[nn.Module], module._lookups):
                        if late is not None and not _is_replicated(lookup):
                            late.start_after(lookup)

    def start_sparse_data_dist(self, batch: Any, context: TrainPipelineContext) -> None:
        """As the base class; where the sizes of a batch's ids are sent already, sends the ids."""
        assert isinstance(context, _RowsAheadContext)
        if context.has_sizes:
            self.wait_sparse_data_dist(context)
        else:
            super().start_sparse_data_dist(batch, context)
            context.has_sizes = True
            if self._device.type == "cpu":
                context.fused_splits_awaitables = [
                    (names, JoinedIds(sizes)) for names, sizes in context.fused_splits_awaitables
                ]

    def _refuse_loading(self, module: nn.Module, _: Any) -> None:
        if any(isinstance(each, _RowsAheadContext) and each.rows for each in self.contexts):
            raise ExactnessError(
                f"weights of a {type(module).__name__} were loaded when rows of the next batch had "
                "been looked up: train until no batch is left, or reset() the pipeline, or say "
                "training.overlap: false"
            )

    def _backward(self, losses: Tensor) -> None:
        with nullcontext() if self._late is None else self._late.later():
            super()._backward(losses)
            if self._late is not None:
                self._late.start()
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
        """Have the rows in the form that the model takes, while sums are still under way."""
        assert isinstance(context, _RowsAheadContext)
        with record_function(f"## take {context.index} ##"):
            for module in _ahead(self._pipelined_modules):
                if not any(map(_is_replicated, module._lookups)):
                    name = module.forward.name
                    context.rows[name] = LazyNoWait(context.rows[name].wait())


def overlaps(model: nn.Module, device: torch.device, asked: bool | None) -> bool:
    """Whether a model trains so; where nobody has asked, on CPUs of several nodes that send rows.

    Not without a module whose rows can be looked up ahead.
    """
    if asked is False or not dist.is_initialized() or isinstance(model, DMPCollection):
        return False
    ahead = _ahead([module for _, module in outermost_sharded(model)])
    if asked or not ahead:
        return bool(ahead)
    plans = [module.module_sharding_plan for module in ahead]
    return device.type == "cpu" and crosses_links() and any(map(_sends_rows, plans))


def plan_overlaps(plan: ShardingPlan, asked: bool | None) -> bool:
    """Whether a plan has a module whose rows can be looked up ahead, and are sent if not asked."""
    modules = [m for m in plan.plan.values() if isinstance(m, EmbeddingModuleShardingPlan)]
    return any(_is_final_early(each) and (asked or _sends_rows(each)) for each in modules)


def _ahead(modules: Sequence[Any]) -> list[Any]:
    """Those that are looked up ahead; of sequences first, which have more to send."""
    chosen = [module for module in modules if _looks_up_ahead(module)]
    return sorted(chosen, key=lambda module: isinstance(module, ExactShardedEmbeddingBagCollection))


def _sends_rows(plan: Mapping[str, ParameterSharding]) -> bool:
    return any(
        sharding.sharding_type != ShardingType.DATA_PARALLEL.value for sharding in plan.values()
    )


def _is_final_early(plan: Mapping[str, ParameterSharding]) -> bool:
    return all(
        sharding.compute_kernel == EmbeddingComputeKernel.FUSED.value
        or sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        for sharding in plan.values()
    )


def _looks_up_ahead(module: Any) -> bool:
    """Whether rows of the next batch are final when the backward pass of this one is over.

    Those of data-parallel tables are read later. Rows of other kernels learn in the optimizer's
    step, or move by steps, and trackers of lookups may go by steps; what counts ids does not.
    """
    return (
        isinstance(module, (ExactShardedEmbeddingBagCollection, ExactShardedEmbeddingCollection))
        and tracker_of(module) is None
        and _is_final_early(module.module_sharding_plan)
    )
