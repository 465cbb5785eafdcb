"""TorchRec's sharded embedding modules, exact on CPU for every input that they accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.distributed.mean_pooling import (
    align_inverse_indices,
    divide_row_wise_tables_only,
    exact_divisor,
)
from recd_plugins.distributed.portable_kernels import use_portable_lookups
from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.errors import ExactnessError

_ROW_WISE = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}


class ExactShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """Takes deduplicated (VBE) batches, and batches of different sizes, in every sharding.

    The reduce-scatter of row-wise tables gathers gradients of different sizes in its backward pass,
    which gloo cannot ("allgather: invalid tensor size"). TorchRec's synchronous collectives use an
    all-to-all instead; they are switched on for exactly those output dists.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(
            module, table_name_to_parameter_sharding, env, fused_params, device, **arguments
        )
        self._on_cpu = device is None or device.type == "cpu"
        if self._on_cpu:
            # _lookups (torchrec 1.6 to 1.9): a list that no public attribute shows.
            require_attributes(self, "_lookups")
            use_portable_lookups(self._lookups)
        configs = module.embedding_bag_configs()
        shardings = {c.name: table_name_to_parameter_sharding[c.name] for c in configs}
        self._divides_afterwards = divide_row_wise_tables_only(self, configs, shardings)
        self._dense_tables = _with_dense_kernel(shardings)
        self._weighted = module.is_weighted()
        self._any_row_wise = any(s.sharding_type in _ROW_WISE for s in shardings.values())

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """As the base class.

        Raises:
            ExactnessError: dense kernels would get a variable batch, or inverse indices would be
                ignored.
        """
        if isinstance(features, KeyedJaggedTensor):
            variable = features.variable_stride_per_key()
            if variable and self._dense_tables:
                raise ExactnessError(
                    f"tables {', '.join(self._dense_tables)} have a dense kernel (as data-parallel "
                    "tables do), which takes no deduplicated input (a KeyedJaggedTensor with "
                    "stride_per_key_per_rank): put them into an EmbeddingBagCollection of their "
                    "own and feed it all rows (batch.replicated_features)"
                )
            if not variable and features.inverse_indices_or_none() is not None:
                raise ExactnessError(
                    "the input of an EmbeddingBagCollection has inverse_indices, but no "
                    "stride_per_key_per_rank, without which TorchRec ignores them: pass "
                    "stride_per_key_per_rank=[[unique rows], ...]"
                )
            if variable and self._divides_afterwards:
                features = align_inverse_indices(self, features)
        awaitable = super().input_dist(ctx, features)
        if self._divides_afterwards and not self._weighted:
            ctx.divisor = exact_divisor(ctx.divisor)
        return awaitable

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """As the base class; what train pipelines call too."""
        with _sync_collectives() if self._needs_sync_collectives(ctx) else nullcontext():
            return super().compute_and_output_dist(ctx, input)

    def _needs_sync_collectives(self, ctx: EmbeddingBagCollectionContext) -> bool:
        """The same on all ranks, as all know all batch sizes after the input dist."""
        if not (self._on_cpu and self._any_row_wise):
            return False
        return ctx.variable_batch_per_feature or any(
            len(set(context.batch_size_per_rank)) > 1
            for context in ctx.sharding_contexts
            if context is not None
        )


class ExactShardedEmbeddingCollection(ShardedEmbeddingCollection):
    """Dense (data-parallel) tables are right on CPU; input that loses its gradient is refused."""

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(
            module, table_name_to_parameter_sharding, env, fused_params, device, **arguments
        )
        self._on_cpu = device is None or device.type == "cpu"
        if self._on_cpu:
            # _lookups (torchrec 1.6 to 1.9): a list that no public attribute shows.
            require_attributes(self, "_lookups")
            use_portable_lookups(self._lookups)

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """As the base class.

        Raises:
            ExactnessError: the input is deduplicated as a VBE KeyedJaggedTensor.
        """
        if isinstance(features, KeyedJaggedTensor):
            refuse_inverse_indices(features, allow_variable_batch=not self._on_cpu)
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """As the base class.

        Raises:
            ExactnessError: TorchRec's synchronous collectives are on.
        """
        if self._on_cpu and comm_ops.get_use_sync_collectives():
            raise ExactnessError(
                "an EmbeddingCollection on CPU has no gradient under TorchRec's synchronous "
                "collectives: leave torchrec_use_sync_collectives() and set_use_sync_collectives() "
                "alone; these sharders switch them on where they are needed"
            )
        return super().compute_and_output_dist(ctx, input)


def refuse_inverse_indices(
    features: KeyedJaggedTensor, *, allow_variable_batch: bool = False
) -> None:
    """Refuse an EmbeddingCollection's input whose inverse indices would be lost.

    On CPU a sharded EmbeddingCollection expands a variable batch by
    ``fbgemm.permute_1D_sparse_data``, which has no gradient there (torchrec 1.6 to 1.9): forward
    is right, and the tables never learn. An unsharded one ignores the inverse indices.

    Raises:
        ExactnessError: says what to feed instead.
    """
    variable = features.variable_stride_per_key()
    if variable and allow_variable_batch:
        return
    if variable or features.inverse_indices_or_none() is not None:
        raise ExactnessError(
            "an EmbeddingCollection got deduplicated input as a KeyedJaggedTensor with "
            "stride_per_key_per_rank or inverse_indices, which loses its gradient or its inverse: "
            "feed it a plain KeyedJaggedTensor over unique rows (batch.sequence_features), pool "
            "those, and repeat the results with index_select(0, batch.inverse_lookup[feature])"
        )


def _with_dense_kernel(shardings: Mapping[str, ParameterSharding]) -> list[str]:
    return [
        name
        for name, sharding in shardings.items()
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        or sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
    ]


@contextmanager
def _sync_collectives() -> Iterator[None]:
    """TorchRec's torchrec_use_sync_collectives, which stays on after an exception (1.8)."""
    before = comm_ops.get_use_sync_collectives()
    comm_ops.set_use_sync_collectives(True)
    try:
        yield
    finally:
        comm_ops.set_use_sync_collectives(before)
