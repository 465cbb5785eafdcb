"""Managed collision (MCH) for deduplicated batches, and MCH evictions on CPU.

Managed collision modules remap ids to rows of a table. For deduplicated batches, TorchRec (1.6 to
1.9) counts ids in unique rows only, which silently trains other remappings. FBGEMM's operator that
resets evicted rows exists only for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_modules import (
    ManagedCollisionCollectionSharder,
    ShardedManagedCollisionCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.compat.mean_pooling import RowWiseDivisor, with_inverse_indices_of
from recd_plugins.sharding.batch_form import num_rows, with_an_empty_row
from recd_plugins.sparse.index_select import jagged_index_select


def why_all_rows_remapped(module: BaseManagedCollisionEmbeddingCollection) -> str:
    """Return why a module does not support deduplicated rows; empty if it does."""
    if isinstance(module, ManagedCollisionEmbeddingCollection):
        return "because an EmbeddingCollection returns one embedding per id"
    maps = module._managed_collision_collection._managed_collision_modules
    if not all(type(each) is MCHManagedCollisionModule for each in maps.values()):
        return (
            "because collision maps other than TorchRec's MCHManagedCollisionModule may count "
            "every lookup of an id"
        )
    if module._return_remapped_features:
        return "because TorchRec does not return remapped features for deduplicated batches"
    return ""


class ExactManagedCollisionCollectionSharder(ManagedCollisionCollectionSharder):
    """Sharder of ManagedCollisionCollection with support for deduplicated rows."""

    def shard(
        self,
        module: ManagedCollisionCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        embedding_shardings: list[EmbeddingSharding[Any, Any, Any, Any]],
        device: torch.device | None = None,
        use_index_dedup: bool = False,
    ) -> ShardedManagedCollisionCollection:
        """Return the sharded module. Arguments are those of TorchRec's ``ModuleSharder.shard``."""
        return ExactShardedManagedCollisionCollection(
            module,
            params,
            env=env,
            device=device or torch.device("cpu"),
            embedding_shardings=embedding_shardings,
            use_index_dedup=use_index_dedup,
        )


class ExactShardedManagedCollisionCollection(ShardedManagedCollisionCollection):
    """Remaps the ids of unique rows, but counts ids as often as they occur in the batch.

    MCH eviction policies rank ids by their number of occurrences, and keep a limited history of
    ids. In training, each rank therefore also sends the index of the unique row of each batch row,
    4 bytes per row and feature. The receiving rank repeats the unique rows before it counts ids.
    """

    def input_dist(
        self,
        ctx: Any,
        features: KeyedJaggedTensor,
        skip_permute: bool = False,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the ranks that remap them. In training, also send the inverse indices."""
        if features.variable_stride_per_key() and any(each.training for each in self._maps):
            names, inverse = ctx.inverse_indices
            ctx.all_rows = _AllRows(names, inverse, self._embedding_shardings[0]._pg)
        return super().input_dist(ctx, features, skip_permute)

    def compute(self, ctx: Any, dist_input: KJTList) -> KJTList:
        """Remap ids. In training, count them as often as they occur in the batch."""
        all_rows = getattr(ctx, "all_rows", None)
        if all_rows is None:
            return super().compute(ctx, dist_input)
        for features, tables, splits in zip(
            dist_input,
            self._sharding_tables,
            self._sharding_per_table_feature_splits,
            strict=True,
        ):
            every_row = all_rows.of(features)
            for table, of_table in zip(tables, every_row.split(splits), strict=True):
                ids = JaggedTensor(values=of_table.values(), lengths=of_table.lengths())
                self._managed_collision_modules[table].profile({table: ids})
        training = [each for each in self._maps if each.training]
        try:
            for each in training:
                each.eval()  # these must not count the unique rows again
            return super().compute(ctx, dist_input)
        finally:
            for each in training:
                each.train()

    @property
    def _maps(self) -> list[nn.Module]:
        return list(self._managed_collision_modules.values())


class _AllRows:
    """All-gathers the inverse indices of all ranks, from batch row to unique row."""

    def __init__(self, names: Sequence[str], inverse: Tensor, group: dist.ProcessGroup) -> None:
        self._place = {name: index for index, name in enumerate(names)}
        num_rows = [inverse.new_zeros(1) for _ in range(group.size())]
        dist.all_gather(num_rows, inverse.new_tensor([inverse.shape[1]]), group)
        self._num_rows = torch.cat(num_rows).tolist()
        # Padded to one size, as gloo requires.
        sent = torch.zeros(
            len(names), max(self._num_rows), dtype=torch.int32, device=inverse.device
        )
        sent[:, : inverse.shape[1]] = inverse
        self._inverse = [torch.empty_like(sent) for _ in self._num_rows]
        self._work = dist.all_gather(self._inverse, sent, group, async_op=True)

    def of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Repeat the unique rows to get all batch rows of all ranks, in rank order."""
        self._work.wait()
        rows, first = [], 0
        for name, strides in zip(features.keys(), features.stride_per_key_per_rank(), strict=True):
            for inverse, of_rank, stride in zip(
                self._inverse, self._num_rows, strides, strict=True
            ):
                if inverse.is_cuda:  # gathered on the stream of the input dist
                    inverse.record_stream(torch.cuda.current_stream())
                rows.append(inverse[self._place[name], :of_rank] + first)
                first += stride
        stored = JaggedTensor(features.values(), lengths=features.lengths())
        every_row = jagged_index_select(stored, torch.cat(rows))
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=every_row.values(),
            lengths=every_row.lengths(),
            stride=sum(self._num_rows),
        )


def mend_managed_collision(
    sharded: BaseShardedManagedCollisionEmbeddingCollection[Any], device: torch.device | None
) -> None:
    """Fix mean pooling, empty batches and (on CPU) evictions of a sharded module, in place."""
    input_dist = sharded.input_dist
    order = sharded._managed_collision_collection._feature_names

    def aligned(ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        if not num_rows(features):
            ctx.no_rows, features = True, with_an_empty_row(features)
        if features.variable_stride_per_key():
            features = with_inverse_indices_of(features, order)
        # TorchRec calls the output dist of the embedding module, but not its input dist.
        divisor: RowWiseDivisor | None = getattr(sharded._embedding_module, "divisor", None)
        if divisor is not None:
            ctx.divisor = divisor(features)
        return input_dist(ctx, features)

    sharded.input_dist = aligned
    if device is None or device.type == "cpu":
        for kernel, _ in sharded._table_to_tbe_and_index.values():
            kernel.reset_embedding_weight_momentum = partial(reset_rows, kernel)


def reset_rows(
    kernel: Any,
    pruned_indices: Tensor,
    pruned_indices_offsets: Tensor,
    logical_table_ids: Tensor,
    buffer_ids: Tensor,
) -> None:
    """CPU version of FBGEMM's ``reset_weight_momentum``, which resets evicted rows on CUDA.

    Sets the rows and their row-wise Adagrad momentum to zero. The state of other optimizers does
    not change. TorchRec reinitializes the rows afterwards.
    """
    if kernel.optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return
    weights, states = kernel.split_embedding_weights(), kernel.split_optimizer_states()
    for table, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
        first, last = pruned_indices_offsets[buffer : buffer + 2].tolist()
        rows = pruned_indices[first:last]
        weights[table][rows] = 0
        states[table][0][rows] = 0
