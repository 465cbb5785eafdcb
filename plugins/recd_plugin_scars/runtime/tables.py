"""TorchRec's and FBGEMM's view of cached tables: names, shapes, shards and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from recd_plugin_scars.runtime.row_cache import CachedShard
from recd_plugin_scars.runtime.spec import TableCache
from recd_plugin_scars.runtime.stores import BackingStore, open_backing_store
from recd_plugins.api import SetupError, require_attributes

_OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
_WEIGHT_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
# The fused_params that the kernel over fast memory gets as well.
_ARGUMENTS = (
    "eps",
    "gradient_clipping",
    "learning_rate",
    "max_gradient",
    "optimizer",
    "output_dtype",
    "stochastic_rounding",
    "weight_decay",
    "weight_decay_mode",
)
# The fused_params that concern the tables' kernel only, or FBGEMM's own cache.
_OTHERS = (
    "bounds_check_mode",
    "cache_algorithm",
    "cache_load_factor",
    "cache_precision",
    "cache_reserved_memory",
    "cache_sets",
    "embedding_table_index_type",
    "embedding_table_offset_type",
    "enable_raw_embedding_streaming",
    "enforce_hbm",
    "prefetch_pipeline",
    "uvm_host_mapped",
)
# Buffers that a check of bounds reads (fbgemm 1.6 to 1.9).
_OF_BOUNDS = ("D_offsets", "bounds_check_warning", "rows_per_table")


def table_names(config: GroupedEmbeddingConfig) -> str:
    """Names of a kernel's tables, for messages."""
    return ", ".join(dict.fromkeys(table.name for table in config.embedding_tables))


def fbgemm_arguments(config: GroupedEmbeddingConfig, device: torch.device) -> dict[str, Any]:
    """Return FBGEMM's arguments for the update of the rows.

    Args:
        config: of the kernel's tables.
        device: of the fast memory.

    Raises:
        SetupError: cached tables cannot learn exactly with these arguments.
    """
    params = config.fused_params or {}
    optimizer = params.get("optimizer", EmbOptimType.EXACT_SGD)
    unknown = params.keys() - {*_ARGUMENTS, *_OTHERS}
    why = None
    if unknown:
        why = f"fused_params {', '.join(sorted(unknown))}; they know {', '.join(_ARGUMENTS)}"
    elif params.get("enable_raw_embedding_streaming"):
        why = "enable_raw_embedding_streaming, which needs FBGEMM's own cache"
    elif config.data_type != DataType.FP32:
        why = f"{config.data_type.name} rows; only FP32 rows can be cached"
    elif optimizer not in _OPTIMIZERS:
        known = " or ".join(each.name for each in _OPTIMIZERS)
        why = f"the optimizer {optimizer.name}; take {known}"
    elif params.get("weight_decay_mode", WeightDecayMode.NONE) not in _WEIGHT_DECAYS:
        why = f"weight_decay_mode {params['weight_decay_mode'].name}, which changes unread rows"
    elif params.get("weight_decay") and device.type == "cpu":
        why = "weight_decay, which FBGEMM's CPU kernels ignore where they pool; train on a GPU"
    if why:
        raise SetupError(f"cached tables {table_names(config)} do not support {why}")
    return {name: params[name] for name in _ARGUMENTS if name in params}


def with_parameters_on_host(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """Return a description whose parameters and optimizer state are on the CPU of each rank."""
    config = copy.copy(config)
    config.embedding_tables = [copy.copy(table) for table in config.embedding_tables]
    for table in config.embedding_tables:
        table.local_metadata = copy.deepcopy(table.local_metadata)
        table.global_metadata = copy.deepcopy(table.global_metadata)
        shards = list(table.global_metadata.shards_metadata) if table.global_metadata else []
        for shard in [*shards, table.local_metadata]:
            if shard is not None and shard.placement is not None:
                shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")
    return config


def open_store(
    config: GroupedEmbeddingConfig, caches: Mapping[str, TableCache], pg: Any
) -> BackingStore:
    """Open the backing store of a kernel, its tables below each other.

    Raises:
        SetupError: tables are not equally wide or not stored alike; or there is no room.
    """
    tables = config.embedding_tables
    first = tables[0]
    for table in tables:
        if table.local_cols != first.local_cols:
            raise SetupError(
                f"cached tables {first.name} and {table.name} of different widths "
                f"({first.local_cols} and {table.local_cols}) got one kernel: plan them with "
                "CacheParams(prefetch_pipeline=True), by which TorchRec keeps them apart"
            )
        if caches[table.name].folder != caches[first.name].folder:
            raise SetupError(
                f"cached tables {first.name} and {table.name} share a kernel, as they are equally "
                "wide, and are stored in different places: give them one storage"
            )
    rank = dist.get_rank(pg) if dist.is_initialized() else 0
    return open_backing_store(
        caches[first.name].folder,
        name=f"{table_names(config)} of rank {rank}",
        num_rows=sum(table.local_rows for table in tables),
        dim=first.local_cols,
        with_state=(config.fused_params or {}).get("optimizer")
        == EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )


def shards_of(
    config: GroupedEmbeddingConfig, caches: Mapping[str, TableCache]
) -> list[CachedShard]:
    """Return the cached part of this rank's shard of each table of a kernel.

    Raises:
        SetupError: the hot rows are not those of the table.
    """
    shards = []
    for table in config.embedding_tables:
        cache = caches[table.name]
        hot_rows = cache.first_hot_rows(table.name, table.num_embeddings)
        first = _first_row(table)
        here = hot_rows[(hot_rows >= first) & (hot_rows < first + table.local_rows)] - first
        if cache.policy_class.only_hot:
            capacity = len(here)
        else:
            capacity = cache.num_cached_rows(table.local_rows)
        shards.append(
            CachedShard(table.name, table.local_rows, cache.policy_maker, capacity, here[:capacity])
        )
    return shards


def first_values(config: GroupedEmbeddingConfig) -> Callable[[Tensor], None]:
    """Return a function that initialises successive blocks of the rows, as TorchRec does."""
    ends = torch.tensor([table.local_rows for table in config.embedding_tables]).cumsum(0).tolist()
    done = 0

    def initialise(rows: Tensor) -> None:
        nonlocal done
        for table, end in zip(config.embedding_tables, ends, strict=True):
            part = rows[: max(end - done, 0)]
            part.uniform_(table.get_weight_init_min(), table.get_weight_init_max())
            rows = rows[len(part) :]
            done += len(part)

    return initialise


def as_planned(
    caches: Mapping[str, TableCache],
    params: Mapping[str, ParameterSharding],
    configs: Iterable[BaseEmbeddingConfig],
) -> dict[str, TableCache]:
    """Return the caches with the load factors of a plan, where TorchRec's planner has sized them.

    Args:
        caches: by table, those of other modules too.
        params: the sharding of each table of one module.
        configs: of the tables of that module.
    """
    planned = dict(caches)
    for config in configs:
        cache, sharding = caches.get(config.name), params.get(config.name)
        if cache is None or sharding is None or sharding.cache_params is None:
            continue
        load_factor = sharding.cache_params.load_factor
        if load_factor is None:
            continue
        rows = round(load_factor * config.num_embeddings)
        if cache.policy_class.only_hot:  # a static cache never has more rows than its hot_rows
            rows = min(rows, 0 if cache.hot_rows is None else len(cache.hot_rows))
        planned[config.name] = replace(cache, load_factor=rows / config.num_embeddings)
    return planned


class TablesInBackingStore(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's kernel over a backing store, which shows TorchRec weights and optimizer state.

    It looks nothing up. TorchRec's prefetch stage calls its ``prefetch``.

    Args:
        config: of the kernel's tables.
        specs: rows and columns of each table.
        feature_table_map: the table of each feature.
        pooling_mode: of the kernel.
        slow: the backing store.
        arguments: of ``fbgemm_arguments``.
        lookahead: called by ``prefetch``; None without lookahead.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        specs: list[tuple[int, int]],
        feature_table_map: list[int],
        pooling_mode: PoolingMode,
        slow: BackingStore,
        arguments: dict[str, Any],
        lookahead: Callable[[Tensor, list[int]], None] | None,
    ) -> None:
        arguments = dict(arguments)
        bounds_check = (config.fused_params or {}).get("bounds_check_mode")
        if bounds_check is not None:
            arguments["bounds_check_mode"] = bounds_check
        memory = {"weights": slow.weights.view(-1)}
        if slow.state is not None:
            memory["momentum1"] = slow.state
        super().__init__(
            [(rows, columns, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, columns in specs],
            feature_table_map=feature_table_map,
            pooling_mode=pooling_mode,
            device=torch.device("cpu"),
            table_names=[table.name for table in config.embedding_tables],
            preallocated_host_buffers=memory,  # FBGEMM 1.7 or later
            **arguments,
        )
        # TorchRec asks by this name whether a kernel can prefetch in a pipeline.
        self.prefetch_pipeline = lookahead is not None
        self._lookahead = lookahead

    def bounds_checker(self, device: torch.device) -> TablesInBackingStore:
        """Return a kernel whose ``prepare_inputs`` takes ids on a device."""
        if device.type == "cpu":
            return self
        require_attributes(self, *_OF_BOUNDS)
        other = copy.copy(self)
        other._buffers = {
            name: buffer.to(device) if name in _OF_BOUNDS and buffer is not None else buffer
            for name, buffer in self._buffers.items()
        }
        return other

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: torch.cuda.Stream | None = None,  # noqa: ARG002 - lookups wait
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> None:
        """Start to read the rows of a batch, as TorchRec's lookups call it."""
        if self._lookahead is None:
            return
        num_features = len(self.feature_table_map)
        if batch_size_per_feature_per_rank is None:
            bags = [(len(offsets) - 1) // num_features] * num_features
        else:
            bags = [sum(sizes) for sizes in batch_size_per_feature_per_rank]
        ends = torch.tensor([0, *bags]).cumsum(0).to(offsets.device)
        ids_per_feature = offsets.index_select(0, ends).diff().tolist()
        self._lookahead(indices, ids_per_feature)


class FlushingOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer, whose state includes what fast memory has learned.

    Parameters and state are tensors of the backing store, so rows are flushed before the state is
    read, and read again after a state was loaded.

    Args:
        flush: of the kernel.
        load: of the kernel.
        arguments: TorchRec's.
    """

    def __init__(
        self, *, flush: Callable[[], None], load: Callable[[], None], **arguments: Any
    ) -> None:
        self._flush: Callable[[], None] | None = None
        super().__init__(**arguments)
        self._flush = flush
        self._load = load

    @property
    def state(self) -> Any:
        """The state by parameter."""
        if self._flush is not None:
            self._flush()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def post_load_state_dict(self) -> None:
        """Called after loading, by an optimizer around this one too."""
        super().post_load_state_dict()
        self._load()


def _first_row(table: ShardedEmbeddingTable) -> int:
    first: int = 0 if table.local_metadata is None else table.local_metadata.shard_offsets[0]
    return first
