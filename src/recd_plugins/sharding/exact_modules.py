"""TorchRec's two sharded collections, made exact on CPU for every input that they accept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.distributed import comm_ops
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
    ParameterSharding,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recd_plugins.compat.lookup_kernels import (
    flush_kernels,
    follow_state_dicts,
    lookups_with,
    tables_of_row_kernels_stay,
)
from recd_plugins.compat.mean_pooling import (
    align_inverse_indices,
    divide_row_wise_tables_only,
    exact_divisor,
    mean_pooled,
    refuse_means_in_grids,
)
from recd_plugins.compat.portable_kernels import use_portable_lookups
from recd_plugins.compat.row_updates import ClippedGradients, plain_updates, why_plain_kernels
from recd_plugins.interfaces.tables import LookupKernels
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.rank_agreement import gathers_equal_sizes
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.batch_form import (
    BatchForm,
    ExactBagContext,
    ExactSequenceContext,
    IdWeights,
    StoredRows,
    accepts_deduplicated,
    keep_inverse_indices,
    num_rows,
    pooled_without_rows,
    refuse_inverse_indices,
    set_unique_strides,
    with_an_empty_row,
    without_rows,
)
from recd_plugins.sharding.coalesced.input_dist import (
    check_coalesced,
    coalesce_bags,
    coalesce_sequences,
    feature_groups,
)
from recd_plugins.sharding.coalesced.outputs import BagLayout, CoalescedBags, CoalescedSequences
from recd_plugins.sharding.gradient_dedup import dedup_gradients
from recd_plugins.sharding.wire import ADDED_ON_THE_WAY, why_plain_codecs
from recd_plugins.sparse.deduplicated_kjt import unique_rows


class _RowKernels:
    """Mixin for TorchRec's sharded collections that uses lookup kernels of plugins."""

    lookup_kernels: tuple[LookupKernels, ...]  # set before the base class creates the lookups

    def reset_parameters(self) -> None:
        """Reset the tables; row kernels then read their rows again before the next use."""
        flush_kernels(self)  # type: ignore[arg-type]
        super().reset_parameters()  # type: ignore[misc]

    def _create_lookups(self) -> None:
        with lookups_with(self.lookup_kernels):
            super()._create_lookups()  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``to``, ``half`` and the like to all tables except those of row kernels."""
        tables = getattr(self, "embedding_bags", None) or self.embeddings  # type: ignore[attr-defined]
        with tables_of_row_kernels_stay(self, tables):  # type: ignore[arg-type]
            moved: Self = super()._apply(fn, recurse)  # type: ignore[misc]
        return moved


class ExactShardedEmbeddingBagCollection(_RowKernels, ShardedEmbeddingBagCollection):
    """Accepts deduplicated (VBE) batches, and a batch size per rank, in every sharding.

    The reduce-scatter of row-wise tables gathers gradients of different sizes in its backward pass.
    Gloo does not support that ("allgather: invalid tensor size"). TorchRec's synchronous
    collectives use an all-to-all instead, so they are enabled for these output dists only.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        kernels: Sequence[LookupKernels] = (),
        coalesced: Collection[str] = (),
        **arguments: Any,
    ) -> None:
        plan = table_name_to_parameter_sharding
        name = arguments.get("module_fqn") or "an EmbeddingBagCollection"
        means = mean_pooled(module)
        refuse_means_in_grids(means, plan)
        self._weighted = module.is_weighted()
        self._id_weights = IdWeights(name, weighted=self._weighted, means=means)
        check_coalesced(coalesced, plan, pooled=True)
        self.clipped = ClippedGradients(module, plan, fused_params, coalesced)
        device_type = "cpu" if device is None else device.type
        self._in_blocks = why_plain_codecs(arguments.get("qcomm_codecs_registry"))
        self.fused_params = fused_params
        self.lookup_kernels = tuple(kernels)
        super().__init__(module, plan, env, fused_params, device, **arguments)
        self._gathers_equal_sizes = gathers_equal_sizes(env.process_group, device_type)
        if device_type == "cpu":
            use_portable_lookups(self._lookups)
        follow_state_dicts(self)
        configs = module.embedding_bag_configs()
        shardings = {c.name: plan[c.name] for c in configs}
        self._groups = feature_groups(configs, coalesced)
        self._layout: BagLayout | None = None
        if self._groups is None:
            self._divided_columns = divide_row_wise_tables_only(self, configs, shardings)
        else:
            self._layout = BagLayout(self, configs, shardings, self._groups)
            self._divided_columns = None
            self._has_mean_pooling_callback = False  # BagLayout divides
        self._any_row_wise = any(s.sharding_type in ADDED_ON_THE_WAY for s in shardings.values())
        updates = plain_updates(module, fused_params, device_type)
        self.form = BatchForm(
            name,
            why_plain_kernels(shardings, updates, on_cpu=device_type == "cpu")
            or self._in_blocks
            or self.clipped.why_plain,
            (name for config in configs for name in config.feature_names),
            env.process_group,
        )

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,  # noqa: ARG002
        env: ShardingEnv,  # noqa: ARG002
        device: torch.device | None,  # noqa: ARG002
    ) -> None:
        """Refuse ``DistributedModelParallel.reshard``, which would rebuild the lookups."""
        raise SetupError(
            f"{self.form.name} is sharded exactly, which DistributedModelParallel.reshard would "
            "undo in part: shard the model anew by the new plan, and load a checkpoint"
        )

    def create_context(self) -> ExactBagContext:
        return ExactBagContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids; for coalesced tables only unique ones. Refuses input that would be ignored."""
        features = maybe_td_to_kjt(features)
        if isinstance(features, KeyedJaggedTensor):
            features = self._checked(ctx, features)
        if self._groups is not None:
            if self._weighted and features.weights_or_none() is None:
                raise ExactnessError(
                    "a weighted EmbeddingBagCollection with coalesced tables got a batch without "
                    "weights; those of a FeatureProcessedEmbeddingBagCollection come when ids are "
                    "unique, too late: leave its tables out of coalesced"
                )
            assert isinstance(ctx, ExactBagContext)
            with torch.no_grad():
                features, ctx.coalesced = coalesce_bags(features, self._groups)
        elif isinstance(features, KeyedJaggedTensor):
            features = self.form.fit(features)
        awaitable = self.distribute(ctx, features)
        if self._divided_columns is not None:
            ctx.divisor = exact_divisor(ctx.divisor, self._divided_columns)
        return awaitable

    def _checked(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        if self.form.takes_unique_rows:
            features = unique_rows(features)
        keep_inverse_indices(features)
        features = self.form.ordered(features)
        self._id_weights.check_batch(features)
        variable = features.variable_stride_per_key()
        has_inverse = features.inverse_indices_or_none() is not None
        # Coalescing needs the inverse indices of each feature.
        if variable != has_inverse and (has_inverse or self._groups is None):
            raise ExactnessError(
                f"{self.form.name}: the batch has only one of stride_per_key_per_rank and "
                f"inverse_indices, for {shortened(features.keys())}, and TorchRec would ignore it: "
                "pass both, or neither"
            )
        # A single row must not be padded to a whole block.
        if not (num_rows(features) or self._in_blocks) and isinstance(ctx, ExactBagContext):
            ctx.no_rows, features = True, with_an_empty_row(features)
        if variable and self._divided_columns is not None:
            features = align_inverse_indices(self, features)
        return features

    def distribute(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids, which are already unique for coalesced tables."""
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up rows and send embeddings; train pipelines call this method too."""
        if self._groups is None:  # weights of coalesced tables stay on their rank
            self._id_weights.check_sent(input)
        set_unique_strides(ctx, input)
        with _sync_collectives() if self._needs_sync_collectives(ctx) else nullcontext():
            return self._pooled(ctx, self.look_up(ctx, input))

    def look_up(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up the ids that ``distribute`` sent, and send their embeddings."""
        return super().compute_and_output_dist(ctx, input)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[Tensor]:
        set_unique_strides(ctx, dist_input)
        return super().compute(ctx, dist_input)

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        with _sync_collectives() if self._needs_sync_collectives(ctx) else nullcontext():
            return self._pooled(ctx, super().output_dist(ctx, output))

    def _pooled(
        self, ctx: EmbeddingBagCollectionContext, rows: LazyAwaitable[KeyedTensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Pool a coalesced batch, and remove the empty row if one was added."""
        if self._layout is not None:
            assert isinstance(ctx, ExactBagContext)
            assert ctx.coalesced is not None
            rows = CoalescedBags(
                rows._awaitables, rows._batch_size_per_feature_pre_a2a, ctx.coalesced, self._layout
            )
        if getattr(ctx, "no_rows", False):  # the context may belong to a module that wraps this one
            rows.callbacks.append(pooled_without_rows)
        return rows

    def _needs_sync_collectives(self, ctx: EmbeddingBagCollectionContext) -> bool:
        """Return whether batch sizes differ; the same on all ranks, since all know every size."""
        if not (self._gathers_equal_sizes and self._any_row_wise):
            return False
        return ctx.variable_batch_per_feature or any(
            len(set(context.batch_size_per_rank)) > 1
            for context in ctx.sharding_contexts
            if context is not None
        )


@contextmanager
def _sync_collectives() -> Iterator[None]:
    """Enable TorchRec's synchronous collectives, and reset them even after an exception.

    TorchRec's own ``torchrec_use_sync_collectives`` stays enabled after an exception (1.8).
    """
    before = comm_ops.get_use_sync_collectives()
    comm_ops.set_use_sync_collectives(True)
    try:
        yield
    finally:
        comm_ops.set_use_sync_collectives(before)


class ExactShardedEmbeddingCollection(_RowKernels, ShardedEmbeddingCollection):
    """Trains data-parallel tables correctly on CPU, and refuses input that would lose gradients.

    ``distribute`` and ``look_up`` receive the unique ids of coalesced tables. Subclasses can change
    ids in these methods.

    Attributes:
        dedups_gradients: whether ``DedupGradientAllToAll`` sends the gradients.
    """

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        kernels: Sequence[LookupKernels] = (),
        coalesced: Collection[str] = (),
        **arguments: Any,
    ) -> None:
        plan = table_name_to_parameter_sharding
        check_coalesced(coalesced, plan, pooled=False)
        self.clipped = ClippedGradients(module, plan, fused_params, coalesced)
        self.fused_params = fused_params
        self.lookup_kernels = tuple(kernels)
        self._groups = feature_groups(module.embedding_configs(), coalesced)
        super().__init__(module, plan, env, fused_params, device, **arguments)
        self._on_cpu = device is None or device.type == "cpu"
        form = StoredRows if accepts_deduplicated(module) else BatchForm
        self.form = form(
            arguments.get("module_fqn") or "an EmbeddingCollection",
            self._why_plain(),
            (name for config in module.embedding_configs() for name in config.feature_names),
            env.process_group,
        )
        self.dedups_gradients = self._on_cpu and dedup_gradients(self._output_dists)
        if self._on_cpu:
            use_portable_lookups(self._lookups)
        follow_state_dicts(self)
        if self._groups is not None and self._use_index_dedup:
            raise SetupError(
                "use_index_dedup and coalesced tables in one EmbeddingCollection: leave "
                "use_index_dedup away, as coalescing does the same"
            )

    def create_context(self) -> ExactSequenceContext:
        return ExactSequenceContext()

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids; for coalesced tables only unique ones. Refuses input that would be ignored."""
        features = maybe_td_to_kjt(features)
        if isinstance(features, KeyedJaggedTensor):
            features = unique_rows(features)
            refuse_inverse_indices(features, allow_variable_batch=True)
            if isinstance(self.form, StoredRows) and features.variable_stride_per_key():
                self.clipped.check_stored(features.keys())
            features = self.form.fit(self.form.ordered(features))
            if not num_rows(features) and isinstance(ctx, ExactSequenceContext):
                ctx.no_rows, features = True, with_an_empty_row(features)
        if self._groups is not None:
            assert isinstance(ctx, ExactSequenceContext)
            with torch.no_grad():
                features, ctx.coalesced = coalesce_sequences(features, self._groups)
        return self.distribute(ctx, features)

    def _why_plain(self) -> str:
        if self._groups is not None:
            return "from which unique ids are taken"
        if self._on_cpu:
            return "as TorchRec loses their gradient on CPU"
        return self.clipped.why_plain

    def distribute(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids, which are already unique for coalesced tables."""
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up rows and send embeddings; refuse TorchRec's synchronous collectives."""
        if self._on_cpu and comm_ops.get_use_sync_collectives():
            raise ExactnessError(
                "an EmbeddingCollection on CPU has no gradient under TorchRec's synchronous "
                "collectives: leave torchrec_use_sync_collectives() and set_use_sync_collectives() "
                "alone; these sharders switch them on where they are needed. torch.compile of the "
                "whole model switches them on, too: compile its dense part"
            )
        return self._expanded(ctx, self.look_up(ctx, input))

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self._expanded(ctx, super().output_dist(ctx, output))

    def _expanded(
        self, ctx: EmbeddingCollectionContext, embeddings: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Expand a coalesced batch, and remove the empty row if one was added."""
        if self._groups is not None:
            assert isinstance(ctx, ExactSequenceContext)
            assert ctx.coalesced is not None
            embeddings = CoalescedSequences(
                embeddings, ctx.coalesced, self._groups, self._need_indices
            )
        if getattr(ctx, "no_rows", False):  # the context may belong to a module that wraps this one
            embeddings.callbacks.append(without_rows)
        return embeddings

    def look_up(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up the ids that ``distribute`` sent, and send their embeddings."""
        return super().compute_and_output_dist(ctx, input)
