"""Sharded collections that insert raw ids into tables, on the rank of the id's bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_dynamic.index.mix import bucket_width, mix
from recd_plugin_dynamic.runtime.collection import DynamicBags, DynamicEmbeddings
from recd_plugin_dynamic.runtime.rank_index import RankIndex, Shard
from recd_plugins.api import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    ExactShardedEmbeddingBagCollection,
    ExactShardedEmbeddingCollection,
    RecdError,
    SetupError,
    jagged,
    lookup_kernels,
)


class _ShardedDynamic:
    """Mixin for exact sharded modules with dynamic tables, which are sharded row-wise.

    The ids of dynamic tables are mixed (see ``index.mix``) and sent to the rank of their bucket.
    Before the lookup, that rank replaces them by rows of its shard, and resets evicted rows. This
    happens in the order of the training steps, so checkpoints have the index of their step.
    """

    # The index of a later batch must not be in a checkpoint.
    looks_up_ahead = False

    def __init__(
        self: Any,
        module: DynamicBags | DynamicEmbeddings,
        plan: dict[str, ParameterSharding],
        env: ShardingEnv,
        *more: Any,
        **named: Any,
    ) -> None:
        self._dynamic = module.dynamic
        for name, table in module.dynamic.items():
            if plan[name].sharding_type != ShardingType.ROW_WISE.value:
                raise SetupError(
                    f"table {name!r}: the sharding plan uses {plan[name].sharding_type!r}, which "
                    "dynamic.table does not support. Use "
                    "ParameterConstraints(sharding_types=['row_wise'])."
                )
            if table.num_buckets % env.world_size:
                raise SetupError(
                    f"table {name!r} has {table.num_buckets} buckets, which cannot be divided "
                    f"among {env.world_size} ranks. Set option 'buckets' of dynamic.table to a "
                    "multiple of the number of ranks."
                )
        super().__init__(module, plan, env, *more, **named)  # type: ignore[call-arg]
        assert env.process_group is not None
        self._rank_indices = {
            name: RankIndex(table, env.rank, env.world_size)
            for name, table in self._dynamic.items()
        }
        pooled = isinstance(module, DynamicBags)
        configs: Any = module.embedding_bag_configs() if pooled else module.embedding_configs()
        self._bounds = {
            each.name: (each.get_weight_init_min(), each.get_weight_init_max()) for each in configs
        }
        self._index_states = {
            f"row_state.{name}.{key}": _sharded(tensor, env.rank, env.process_group)
            for name, index in self._rank_indices.items()
            for key, tensor in index.state().items()
        }
        self._register_state_dict_hook(_add_index_states)
        self._register_load_state_dict_pre_hook(_take_index_states, with_module=True)

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        """Load weights and row state; weights only while TorchRec creates the module."""
        if "_index_states" not in vars(self):
            state_dict = {
                name: each for name, each in state_dict.items() if not name.startswith("row_state.")
            }
        return super().load_state_dict(state_dict, *more, **named)  # type: ignore[misc]

    def _create_input_dist(self: Any, *arguments: Any, **named: Any) -> None:
        super()._create_input_dist(*arguments, **named)  # type: ignore[misc]
        for input_dist, tables in zip(self._input_dists, self._tables_sent, strict=True):
            block_sizes = getattr(input_dist, "_feature_block_sizes_tensor", None)
            for key, name in enumerate(tables):
                if block_sizes is not None and (table := self._dynamic.get(name)) is not None:
                    width = bucket_width(table.num_buckets)
                    block_sizes[key] = width * (table.num_buckets // self._env.world_size)

    @property
    def _shardings(self: Any) -> list[Any]:
        """TorchRec's shardings, in the order of input dists and lookups."""
        by_type = getattr(self, "_sharding_type_to_sharding", None)
        return self._embedding_shardings if by_type is None else list(by_type.values())

    @cached_property
    def _tables_sent(self: Any) -> list[list[str]]:
        """Table name of each key of the KeyedJaggedTensor that each input dist sends."""
        return [
            [
                table.name
                for group in getattr(sharding, "_grouped_embedding_configs", ())
                for table in group.embedding_tables
                for _ in table.feature_names
            ]
            for sharding in self._shardings
        ]

    @cached_property
    def _dynamic_features(self: Any) -> set[str]:
        return {
            feature
            for sharding, tables in zip(self._shardings, self._tables_sent, strict=True)
            for feature, table in zip(sharding.feature_names(), tables, strict=False)
            if table in self._dynamic
        }

    @cached_property
    def _shards(self: Any) -> dict[str, Shard]:
        """Access to this rank's rows of each dynamic table."""
        return {
            table.name: Shard(
                partial(_write_function(kernel), number),
                table.local_cols,
                table.local_metadata.shard_offsets[0],
                self._bounds[table.name],
            )
            for kernel in nn.ModuleList(self._lookups).modules()
            for number, table in enumerate(
                getattr(getattr(kernel, "config", None), "embedding_tables", ())
            )
            if table.name in self._dynamic
        }

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Do nothing, because ``look_up`` assigns the rows of ids."""

    def track_changed_rows(self: Any, mark: Callable[[str, Tensor], None]) -> None:
        """Register ``mark``, which lookups call with a table's name and its changed rows."""
        for name, index in self._rank_indices.items():
            index.changed = partial(mark, name)

    def distribute(self: Any, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Any]:
        """Mix the ids of dynamic tables, then distribute all ids as TorchRec does."""
        with torch.no_grad():
            dynamic = self._dynamic_features
            mixed = [
                mix(ids.long()) if feature in dynamic else ids.long()
                for feature, ids in zip(features.keys(), _split(features), strict=True)
            ]
            features = jagged.with_fields(features, values=torch.cat(mixed))
        return super().distribute(ctx, features)  # type: ignore[misc]

    def look_up(self: Any, ctx: Any, input: KJTList) -> LazyAwaitable[Any]:
        """Insert or find the received ids, and look up their rows."""
        with torch.no_grad():
            received = [
                self._rows_of(kjt, tables) if set(tables) & self._dynamic.keys() else kjt
                for kjt, tables in zip(input, self._tables_sent, strict=True)
            ]
        return super().look_up(ctx, KJTList(received))  # type: ignore[misc]

    def _rows_of(self: Any, received: KeyedJaggedTensor, tables: list[str]) -> KeyedJaggedTensor:
        """Replace received ids of dynamic tables by rows of this rank's shards."""
        values = list(_split(received))
        for name, index in self._rank_indices.items():
            keys = [key for key, table in enumerate(tables) if table == name]
            if keys:
                ids = torch.cat([values[key] for key in keys])
                try:
                    rows = index.rows(ids, self._shards[name], training=self.training)
                except RecdError as error:
                    raise type(error)(f"table {name!r}: {error}") from None
                sizes = [len(values[key]) for key in keys]
                for key, part in zip(keys, torch.split(rows, sizes), strict=True):
                    values[key] = part
        return jagged.with_fields(received, values=torch.cat(values))


def rank_indices(model: nn.Module) -> Iterator[tuple[str, RankIndex]]:
    """Yield the name and this rank's index of each dynamic table."""
    for module in model.modules():
        if isinstance(module, _ShardedDynamic):
            yield from vars(module)["_rank_indices"].items()


def _write_function(kernel: Any) -> Callable[[int, Tensor, Tensor], None]:
    """Return a function (number of the table, rows, weights) that overwrites rows of a kernel."""
    if isinstance(kernel, lookup_kernels.RowKernel):
        return kernel.set_rows
    tables = kernel.emb_module
    if any(place == EmbeddingLocation.MANAGED_CACHING for *_, place, _ in tables.embedding_specs):
        raise SetupError(
            f"tables {', '.join(map(repr, tables.table_names))}: dynamic.table does not support "
            "FBGEMM's cache. Use ParameterConstraints(compute_kernels=['fused', 'fused_uvm'])."
        )

    def write(number: int, rows: Tensor, weights: Tensor) -> None:
        every_weight = tables.split_embedding_weights()[number]
        rows = rows.to(every_weight.device)
        every_weight.index_copy_(0, rows, weights.to(every_weight))
        for state in next(iter(tables.split_optimizer_states()[number:]), ()):
            state.index_fill_(0, rows, 0)

    return write


def _split(features: KeyedJaggedTensor) -> Sequence[Tensor]:
    """Return the values of each key."""
    return torch.split(features.values(), features.length_per_key())


def _sharded(local: Tensor, rank: int, group: dist.ProcessGroup) -> ShardedTensor:
    """Return a ShardedTensor of equally large local tensors, concatenated on dimension 0."""
    size = [local.shape[0] * group.size(), *local.shape[1:]]
    shards = [
        ShardMetadata(
            [each * local.shape[0], *[0] * (local.dim() - 1)], [*local.shape], f"rank:{each}/cpu"
        )
        for each in range(group.size())
    ]
    properties = TensorProperties(dtype=local.dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(local, shards[rank])],
        ShardedTensorMetadata(shards, torch.Size(size), properties),
        process_group=group,
    )


def _add_index_states(
    module: Any, state: dict[str, Any], prefix: str, _metadata: Mapping[str, Any]
) -> None:
    state |= {prefix + name: tensor for name, tensor in module._index_states.items()}


def _take_index_states(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Copy the arrays of the index from a state dict that is being loaded."""
    for name, own in module._index_states.items():
        given = state.pop(prefix + name)
        for into, values in zip(own.local_shards(), given.local_shards(), strict=True):
            into.tensor.copy_(values.tensor)
    for index in module._rank_indices.values():
        index.loaded = True


class ShardedDynamicBags(_ShardedDynamic, ExactShardedEmbeddingBagCollection):
    """Sharded EmbeddingBagCollection with dynamic tables."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # TorchRec warns of ids above num_embeddings in the first batch.
        configs = [copy(config) for config in vars(self)["_embedding_bag_configs"]]
        for config in configs:
            if config.name in self._dynamic:
                config.num_embeddings = (1 << 63) - 1
        self._embedding_bag_configs = configs


class ShardedDynamicEmbeddings(_ShardedDynamic, ExactShardedEmbeddingCollection):
    """Sharded EmbeddingCollection with dynamic tables."""


class DynamicBagsSharder(ExactEmbeddingBagCollectionSharder):
    """Sharder of DynamicBags."""

    module_type: type[DynamicBags] = DynamicBags
    sharded_module_type: type[ShardedDynamicBags] = ShardedDynamicBags


class DynamicEmbeddingsSharder(ExactEmbeddingCollectionSharder):
    """Sharder of DynamicEmbeddings."""

    module_type: type[DynamicEmbeddings] = DynamicEmbeddings
    sharded_module_type: type[ShardedDynamicEmbeddings] = ShardedDynamicEmbeddings
