"""Subclasses of TorchRec's sharded embedding modules that fix wrong results, mainly on CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchrec.distributed import comm_ops
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    NoWait,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recd_plugins.compat.lookup_kernels import (
    flush_kernels,
    follow_state_dicts,
    lookups_with,
    row_kernels,
    tables_of_row_kernels_stay,
)
from recd_plugins.compat.mean_pooling import (
    RowWiseDivisor,
    divide_row_wise_tables_only,
    mean_pooled,
    refuse_means_in_grids,
    refuse_weighted_mean,
)
from recd_plugins.compat.portable_kernels import use_portable_lookups
from recd_plugins.compat.row_updates import clipped_tables, why_plain_kernels
from recd_plugins.compat.vbe_metadata import copy_metadata_once
from recd_plugins.interfaces.tables import LookupKernels
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.rank_agreement import gathers_equal_sizes
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.batch_form import (
    BatchForm,
    ExactBagContext,
    ExactSequenceContext,
    StoredRows,
    accepts_deduplicated,
    keep_inverse_indices,
    num_rows,
    pooled_without_rows,
    refuse_inverse_indices,
    refuse_lost_weights,
    set_unique_strides,
    with_an_empty_row,
    without_rows,
)
from recd_plugins.sharding.coalesced.input_dist import (
    FeatureGroups,
    check_coalesced,
    coalesce_bags,
    coalesce_sequences,
    feature_groups,
    only_expanded,
)
from recd_plugins.sharding.coalesced.outputs import BagLayout, CoalescedBags, CoalescedSequences
from recd_plugins.sharding.gradient_dedup import dedup_gradients
from recd_plugins.sharding.wire import ADDED_ON_THE_WAY, why_plain_codecs
from recd_plugins.sparse.deduplicated_kjt import unique_rows

Plan = dict[str, ParameterSharding]
# Options of TorchRec's row-wise input dists that change ids or weights even for one rank.
_CHANGES = ("_has_feature_processor", "_need_pos", "_has_multiple_blocks_per_shard")


class _ExactCollection:
    """Mixin for TorchRec's sharded embedding modules that adds plugin kernels and coalescing.

    ``distribute`` and ``look_up`` receive the unique ids of coalesced tables. Subclasses can change
    ids in these methods. ``dedups_gradients`` is True if ``DedupGradientAllToAll`` sends the
    gradients.
    """

    #: Whether a train pipeline may call ``look_up`` for the next step before this step is saved.
    looks_up_ahead = True

    def __init__(
        self: Any,
        module: Any,
        plan: Plan,
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        kernels: Sequence[LookupKernels] = (),
        coalesced: Collection[str] = (),
        **arguments: Any,
    ) -> None:
        pooled = isinstance(module, EmbeddingBagCollection)
        configs = module.embedding_bag_configs() if pooled else module.embedding_configs()
        self.clipped = clipped_tables(module, plan, fused_params)
        check_coalesced(coalesced, plan, self.clipped.tables, pooled=pooled)
        self._groups = feature_groups(configs, coalesced)
        if self._groups is not None and arguments.get("use_index_dedup"):
            raise SetupError(
                "an EmbeddingCollection has coalesced tables and use_index_dedup, which both "
                "deduplicate ids. Remove use_index_dedup from its sharder."
            )
        self._device_type = "cpu" if device is None else device.type
        # Set before the base class creates the lookups.
        self.fused_params, self.lookup_kernels = fused_params, tuple(kernels)
        super().__init__(module, plan, env, fused_params, device, **arguments)  # type: ignore[call-arg]
        on_cpu = self._device_type == "cpu"
        self.dedups_gradients = on_cpu and dedup_gradients(self._output_dists)
        if on_cpu:
            use_portable_lookups(self._lookups)
        else:
            copy_metadata_once(self._lookups)
        follow_state_dicts(self)
        form = StoredRows if accepts_deduplicated(module) else BatchForm
        self.form = form(
            arguments.get("module_fqn") or type(module).__name__,
            self._why_plain(module, plan, arguments.get("qcomm_codecs_registry")),
            (name for config in configs for name in config.feature_names),
            env.process_group,
        )

    def reset_parameters(self) -> None:
        """Reset the tables, and make plugin kernels read the new rows."""
        flush_kernels(self)  # type: ignore[arg-type]
        super().reset_parameters()  # type: ignore[misc]
        for kernel in row_kernels(self):  # type: ignore[arg-type]
            kernel.load()

    def _create_lookups(self: Any) -> None:
        with lookups_with(self.lookup_kernels):
            super()._create_lookups()  # type: ignore[misc]

    def _create_input_dist(self: Any, *arguments: Any, **named: Any) -> None:
        super()._create_input_dist(*arguments, **named)  # type: ignore[misc]
        _keep_ids_of_one_rank(self._input_dists)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to all parameters except tables of plugin kernels."""
        tables = getattr(self, "embedding_bags", None) or self.embeddings  # type: ignore[attr-defined]
        with tables_of_row_kernels_stay(self, tables):  # type: ignore[arg-type]
            moved: Self = super()._apply(fn, recurse)  # type: ignore[misc]
        return moved


def _keep_ids_of_one_rank(input_dists: list[nn.Module]) -> None:
    """Replace input dists for one rank, in the given list, by input dists without communication.

    TorchRec (1.6 to 1.9) sends the sizes to itself, reads them back from the device and permutes
    ids into the order that they already have.
    """
    for number, each in enumerate(input_dists):
        exchange: Any = getattr(each, "_dist", None)  # data-parallel tables have none
        changes = any(getattr(each, name, False) for name in _CHANGES)
        if exchange is not None and exchange._pg.size() == 1 and not changes:
            input_dists[number] = _LocalInputDist()


class _LocalInputDist(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        return NoWait(_LocalIds(features))


class _LocalIds(KJTAllToAllTensorsAwaitable):
    """Ids that have arrived, with the fields that TorchRec copies to the sharding context."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        Awaitable.__init__(self)
        self._workers, self._input, self._recat = 1, features, None
        self._input_splits = self._output_splits = {"values": [features.values().numel()]}
        self._stride_per_rank = None if features.variable_stride_per_key() else [features.stride()]

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._input


class ExactShardedEmbeddingBagCollection(_ExactCollection, ShardedEmbeddingBagCollection):
    """Sharded EmbeddingBagCollection for deduplicated (VBE) batches and uneven batch sizes.

    With uneven batch sizes, the backward pass of TorchRec's reduce-scatter fails over Gloo
    ("allgather: invalid tensor size"). For such batches, this class enables TorchRec's synchronous
    collectives, which use an all-to-all, in the output dist of row-wise tables.
    """

    def __init__(
        self, module: EmbeddingBagCollection, plan: Plan, env: ShardingEnv, *more: Any, **named: Any
    ) -> None:
        self._means, self._weighted = mean_pooled(module), module.is_weighted()
        refuse_means_in_grids(self._means, plan)
        if self._weighted:
            refuse_weighted_mean(self._means)
        super().__init__(module, plan, env, *more, **named)
        self._gathers_equal_sizes = gathers_equal_sizes(env.process_group, self._device_type)
        self._any_row_wise = any(s.sharding_type in ADDED_ON_THE_WAY for s in plan.values())
        configs = module.embedding_bag_configs()
        self._layout: BagLayout | None = None
        self.divisor: RowWiseDivisor | None = None
        if self._groups is None:
            self.divisor = divide_row_wise_tables_only(self, configs, plan)
            if self._device_type == "cuda":  # expands unique rows in fewer launches than TorchRec
                names = dict.fromkeys(name for each in configs for name in each.feature_names)
                self._others = FeatureGroups((), tuple(names))
                self._layout = BagLayout(self, configs, plan, self._others, divides=False)
        else:
            self._layout = BagLayout(self, configs, plan, self._groups)
            self._has_mean_pooling_callback = False  # BagLayout divides

    def _why_plain(self, module: EmbeddingBagCollection, plan: Plan, codecs: Any) -> str:
        self._in_blocks = why_plain_codecs(codecs)
        why = why_plain_kernels(module, plan, self.fused_params, self._device_type)
        return why or self._in_blocks or self.clipped.why_plain

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,  # noqa: ARG002
        env: ShardingEnv,  # noqa: ARG002
        device: torch.device | None,  # noqa: ARG002
    ) -> None:
        """Raise SetupError, because ``DistributedModelParallel.reshard`` is not supported."""
        raise SetupError(
            f"{self.form.name}: DistributedModelParallel.reshard is not supported with exact "
            "sharding. Build the model again with the new plan, and load a checkpoint."
        )

    def create_context(self) -> ExactBagContext:
        return ExactBagContext()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Check a batch and send its ids, only distinct ids for coalesced tables."""
        features = self._checked(ctx, maybe_td_to_kjt(features))
        if self._groups is None:
            features = self.form.fit(features)
            if self._layout is not None and features.variable_stride_per_key():
                ctx.coalesced = only_expanded(features, self._others)
        else:
            if self._weighted and features.weights_or_none() is None:
                raise ExactnessError(
                    f"{self.form.name}: a weighted EmbeddingBagCollection with coalesced tables "
                    "got a batch without weights. Pass weights; inside a "
                    "FeatureProcessedEmbeddingBagCollection, do not coalesce its tables."
                )
            with torch.no_grad():
                features, ctx.coalesced = coalesce_bags(features, self._groups)
        if self.divisor is not None:
            ctx.divisor = self.divisor(features)
        return self.distribute(ctx, features)

    def _checked(self, ctx: Any, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if self.form.takes_unique_rows:
            features = unique_rows(features)
        keep_inverse_indices(features)
        features = self.form.ordered(features)
        refuse_lost_weights(features, self._means)
        variable = features.variable_stride_per_key()
        has_inverse = features.inverse_indices_or_none() is not None
        # Coalescing needs the inverse indices of each feature.
        if variable != has_inverse and (has_inverse or self._groups is None):
            raise ExactnessError(
                f"{self.form.name}: the batch has only one of stride_per_key_per_rank and "
                f"inverse_indices for the features {shortened(features.keys())}. Pass both fields "
                "or neither; TorchRec ignores a single one."
            )
        # A single row must not be padded to a whole block.
        if not (num_rows(features) or self._in_blocks) and isinstance(ctx, ExactBagContext):
            ctx.no_rows, features = True, with_an_empty_row(features)
        return features

    def distribute(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the ranks that store their tables; override this to change the ids."""
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up rows and send the embeddings back; train pipelines also call this method."""
        set_unique_strides(ctx, input)
        with _sync_collectives(self._needs_sync_collectives(ctx)):
            return self._pooled(ctx, self.look_up(ctx, input))

    def look_up(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up the ids that ``distribute`` sent, and send the embeddings back."""
        return super().compute_and_output_dist(ctx, input)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[Tensor]:
        set_unique_strides(ctx, dist_input)
        return super().compute(ctx, dist_input)

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        with _sync_collectives(self._needs_sync_collectives(ctx)):
            return self._pooled(ctx, super().output_dist(ctx, output))

    def _pooled(self, ctx: Any, rows: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[KeyedTensor]:
        resized = self._groups is None and getattr(rows, "_resize_awaitables", None)
        if self._layout is not None and ctx.coalesced is not None and not resized:
            rows = CoalescedBags(
                rows._awaitables, rows._batch_size_per_feature_pre_a2a, ctx.coalesced, self._layout
            )
        if self.divisor is not None:
            rows.callbacks.append(partial(self.divisor.divide, divisor=ctx.divisor))
        if getattr(ctx, "no_rows", False):  # the context may belong to a module that wraps this one
            rows.callbacks.append(pooled_without_rows)
        return rows

    def _needs_sync_collectives(self, ctx: EmbeddingBagCollectionContext) -> bool:
        """Return True if batch sizes differ; all ranks know all sizes and return the same value."""
        if not (self._gathers_equal_sizes and self._any_row_wise):
            return False
        return ctx.variable_batch_per_feature or any(
            len(set(context.batch_size_per_rank)) > 1
            for context in ctx.sharding_contexts
            if context is not None
        )


@contextmanager
def _sync_collectives(enabled: bool) -> Iterator[None]:
    """Use TorchRec's synchronous collectives in this context, if ``enabled``."""
    before = comm_ops.get_use_sync_collectives()
    comm_ops.set_use_sync_collectives(enabled or before)
    try:
        yield
    finally:
        comm_ops.set_use_sync_collectives(before)


class ExactShardedEmbeddingCollection(_ExactCollection, ShardedEmbeddingCollection):
    """Sharded EmbeddingCollection with correct gradients for data-parallel tables on CPU."""

    def _why_plain(self, *_: Any) -> str:
        if self._groups is not None:
            return "because the ids of coalesced tables are deduplicated from all rows"
        if self._device_type == "cpu":
            return "because TorchRec loses the gradient of deduplicated batches on CPU"
        return self.clipped.why_plain

    def create_context(self) -> ExactSequenceContext:
        return ExactSequenceContext()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Check a batch and send its ids, only distinct ids for coalesced tables."""
        features = unique_rows(maybe_td_to_kjt(features))
        refuse_inverse_indices(features, allow_variable_batch=True)
        if isinstance(self.form, StoredRows) and features.variable_stride_per_key():
            self.clipped.check_stored(features.keys())
        features = self.form.fit(self.form.ordered(features))
        if not num_rows(features) and isinstance(ctx, ExactSequenceContext):
            ctx.no_rows, features = True, with_an_empty_row(features)
        if self._groups is not None:
            with torch.no_grad():
                features, ctx.coalesced = coalesce_sequences(features, self._groups)
        return self.distribute(ctx, features)

    def distribute(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the ranks that store their tables; override this to change the ids."""
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up rows and send the embeddings back; refuse TorchRec's synchronous collectives."""
        if self._device_type == "cpu" and comm_ops.get_use_sync_collectives():
            raise ExactnessError(
                "an EmbeddingCollection on CPU gets no gradient with TorchRec's synchronous "
                "collectives. Do not call torchrec_use_sync_collectives() or "
                "set_use_sync_collectives(), and compile only the dense part of the model."
            )
        return self._expanded(ctx, self.look_up(ctx, input))

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self._expanded(ctx, super().output_dist(ctx, output))

    def _expanded(
        self, ctx: Any, embeddings: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        if self._groups is not None:
            embeddings = CoalescedSequences(
                embeddings, ctx.coalesced, self._groups, self._need_indices
            )
        if getattr(ctx, "no_rows", False):  # the context may belong to a module that wraps this one
            embeddings.callbacks.append(without_rows)
        return embeddings

    def look_up(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up the ids that ``distribute`` sent, and send the embeddings back."""
        return super().compute_and_output_dist(ctx, input)
