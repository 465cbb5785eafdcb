"""TorchRec's sharded EmbeddingCollection, exact on CPU for every input that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recd_plugins.compat.clipped_gradients import ClippedGradients
from recd_plugins.compat.lookup_kernels import (
    flush_kernels,
    follow_state_dicts,
    lookups_with,
    tables_of_row_kernels_stay,
)
from recd_plugins.compat.portable_kernels import use_portable_lookups
from recd_plugins.interfaces.tables import LookupKernels
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.sharding.batch_form import (
    BatchForm,
    StoredRows,
    refuse_inverse_indices,
    takes_stored_rows,
)
from recd_plugins.sharding.coalesced.groups import check_coalesced, feature_groups
from recd_plugins.sharding.coalesced.input_dist import coalesce_sequences
from recd_plugins.sharding.coalesced.outputs import CoalescedSequences
from recd_plugins.sharding.contexts import (
    ExactSequenceContext,
    num_rows,
    with_an_empty_row,
    without_rows,
)
from recd_plugins.sharding.gradient_dedup import dedup_gradients
from recd_plugins.sparse.deduplicated_kjt import unique_rows


class ExactShardedEmbeddingCollection(ShardedEmbeddingCollection):
    """Dense (data-parallel) tables are right on CPU; input that loses its gradient is refused.

    Of coalesced tables ``distribute`` and ``look_up`` see unique ids; a subclass changes ids there.

    Attributes:
        dedups_gradients: whether ``DedupGradientAllToAll`` sends those of its rows.
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
        self.lookup_kernels = tuple(kernels)  # before the base class creates the lookups
        self._groups = feature_groups(module.embedding_configs(), coalesced)
        super().__init__(module, plan, env, fused_params, device, **arguments)
        self._on_cpu = device is None or device.type == "cpu"
        form = StoredRows if takes_stored_rows(module) else BatchForm
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

    def reset_parameters(self) -> None:
        """Reset tables; row kernels read their rows again before they use them."""
        flush_kernels(self)
        super().reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move tables (``to``, ``half``), but for those whose rows are elsewhere."""
        with tables_of_row_kernels_stay(self, self.embeddings):
            return super()._apply(fn, recurse)

    def _create_lookups(self) -> None:
        """Create the base class's lookups, with plugins' kernels for the tables that have some."""
        with lookups_with(self.lookup_kernels):
            super()._create_lookups()

    def create_context(self) -> ExactSequenceContext:
        """Return the context of a batch."""
        return ExactSequenceContext()

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids; of coalesced tables, unique ids.

        Raises:
            ExactnessError: a feature is missing, or inverse indices are, or would be ignored.
        """
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
        """Send ids, which are unique where tables are coalesced."""
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up and send vectors.

        Raises:
            ExactnessError: TorchRec's synchronous collectives are on.
        """
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
        """Send vectors: the second half of ``compute_and_output_dist``."""
        return self._expanded(ctx, super().output_dist(ctx, output))

    def _expanded(
        self, ctx: EmbeddingCollectionContext, embeddings: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Make rows of all ids from those of a coalesced batch, and take out an empty row."""
        if self._groups is not None:
            assert isinstance(ctx, ExactSequenceContext)
            assert ctx.coalesced is not None
            embeddings = CoalescedSequences(
                embeddings, ctx.coalesced, self._groups, self._need_indices
            )
        if getattr(ctx, "no_rows", False):  # it may be that of a module around this one
            embeddings.callbacks.append(without_rows)
        return embeddings

    def look_up(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up the ids that ``distribute`` sent, and send vectors."""
        return super().compute_and_output_dist(ctx, input)
