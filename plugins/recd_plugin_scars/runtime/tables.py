"""Adapts cached tables to TorchRec and FBGEMM: arguments, parameters and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from recd_plugin_scars.runtime.policies import CachedShard, TableCache
from recd_plugin_scars.runtime.stores import BackingStore, open_backing_store
from recd_plugins.api import SetupError

_OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
_WEIGHT_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
# fused_params that are passed to the kernel over the cache memory.
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
# fused_params that only concern the tables' kernel or FBGEMM's own cache.
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


def table_names(config: GroupedEmbeddingConfig) -> str:
    return ", ".join(dict.fromkeys(repr(table.name) for table in config.embedding_tables))


def fbgemm_arguments(config: GroupedEmbeddingConfig, device: torch.device) -> dict[str, Any]:
    """Return the FBGEMM kernel arguments in ``config.fused_params`` that affect row updates.

    Raises:
        SetupError: cached tables do not support the data type or one of the arguments.
    """
    params = config.fused_params or {}
    optimizer = params.get("optimizer", EmbOptimType.EXACT_SGD)
    unknown = params.keys() - {*_ARGUMENTS, *_OTHERS}
    why = None
    if unknown:
        why = (
            f"the fused_params {', '.join(map(repr, sorted(unknown)))}. Use only "
            f"{', '.join(map(repr, _ARGUMENTS))}."
        )
    elif config.data_type != DataType.FP32:
        why = f"{config.data_type.name} rows. Use FP32 rows."
    elif optimizer not in _OPTIMIZERS:
        known = " or ".join(each.name for each in _OPTIMIZERS)
        why = f"the optimizer {optimizer.name}. Use {known}."
    elif params.get("weight_decay_mode", WeightDecayMode.NONE) not in _WEIGHT_DECAYS:
        why = (
            f"weight_decay_mode {params['weight_decay_mode'].name}, which changes rows that a "
            "batch does not look up. "
        )
        why += "Use another mode."
    elif params.get("weight_decay") and device.type == "cpu":
        why = "weight_decay on CPU, because FBGEMM's pooling kernels ignore it. Train on a GPU."
    if why:
        raise SetupError(f"cached tables {table_names(config)} do not support {why}")
    return {name: params[name] for name in _ARGUMENTS if name in params}


def with_parameters_on_host(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """Return a copy of the config with all shards placed on the CPU of their rank."""
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
    """Create the backing store for all tables of a kernel.

    Raises:
        SetupError: the tables differ in width or storage, or there is not enough space.
    """
    tables = config.embedding_tables
    first = tables[0]
    for table in tables:
        if table.local_cols != first.local_cols:
            raise SetupError(
                f"cached tables {first.name!r} and {table.name!r} share a kernel, but have "
                f"different widths ({first.local_cols} and {table.local_cols}). Set "
                "CacheParams(prefetch_pipeline=True) in their sharding constraints."
            )
        if caches[table.name].folder != caches[first.name].folder:
            raise SetupError(
                f"cached tables {first.name!r} and {table.name!r} share a kernel, but have "
                "different storage. Set option 'storage' of 'scars.cache' to the same value for "
                "both tables."
            )
    rank = dist.get_rank(pg) if dist.is_initialized() else 0
    return open_backing_store(
        caches[first.name].folder,
        name=f"tables {table_names(config)} of rank {rank}",
        num_rows=sum(table.local_rows for table in tables),
        dim=first.local_cols,
        with_state=(config.fused_params or {}).get("optimizer")
        == EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )


def shards_of(
    config: GroupedEmbeddingConfig, caches: Mapping[str, TableCache]
) -> list[CachedShard]:
    """Return the cache configuration of this rank's shard, for each table of a kernel."""
    shards = []
    for table in config.embedding_tables:
        cache, metadata = caches[table.name], table.local_metadata
        hot_rows = cache.first_hot_rows(table.name, table.num_embeddings)
        first = 0 if metadata is None else metadata.shard_offsets[0]
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
    """Return a function that initialises successive blocks of rows, each ``[n, dim]``.

    The values are the same as TorchRec's.
    """
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
    """Return ``caches`` with the load factors in the sharding plan ``params`` of one module."""
    planned = dict(caches)
    for config in configs:
        cache, sharding = caches.get(config.name), params.get(config.name)
        if cache is None or sharding is None or sharding.cache_params is None:
            continue
        load_factor = sharding.cache_params.load_factor
        if load_factor is None:
            continue
        rows = round(load_factor * config.num_embeddings)
        if cache.policy_class.only_hot:  # a static cache has at most as many rows as its hot_rows
            rows = min(rows, 0 if cache.hot_rows is None else len(cache.hot_rows))
        planned[config.name] = replace(cache, load_factor=rows / config.num_embeddings)
    return planned


class TablesInBackingStore(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM module for the full tables, with weights and optimizer state in a backing store.

    TorchRec uses it for state dicts, but not for lookups. ``specs`` are the rows and columns of
    each table, and ``arguments`` are FBGEMM's keyword arguments.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        specs: list[tuple[int, int]],
        feature_table_map: list[int],
        pooling_mode: PoolingMode,
        slow: BackingStore,
        arguments: dict[str, Any],
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


class FlushingOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer of cached tables.

    Parameters and state are tensors of the full tables. So changed rows are written back before
    the state is read, and cached rows are reloaded after a state dict was loaded.
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
        """Return a dict from parameter to optimizer state, after writing changed rows back."""
        if self._flush is not None:
            self._flush()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def post_load_state_dict(self) -> None:
        """Reload the cached rows. TorchRec calls this after loading a state dict."""
        super().post_load_state_dict()
        self._load()


class FastMemory:
    """Cache memory for rows and their optimizer state, with an FBGEMM module for lookups.

    A slot is a row of the cache memory. To FBGEMM, every table is the same memory with all slots,
    so that it sums gradients for each table separately. The memory grows in place, so pending
    backward passes update the same memory. Writes do not increase the version counters of tensors
    saved by autograd, because they never change a row that a backward pass needs.

    Args:
        tables: FBGEMM module of the backing store, which defines optimizer, learning rate and
            pooling.
        arguments: keyword arguments of both FBGEMM modules.
        device: device of the cache memory.

    Attributes:
        kernel: FBGEMM module that looks up slots.
        num_slots: number of allocated slots.
        weights: float32 ``[num_slots, dim]``.
        state: optimizer state, float32 ``[num_slots]``; None without optimizer state.
    """

    num_slots: int
    weights: Tensor
    state: Tensor | None

    def __init__(
        self,
        tables: SplitTableBatchedEmbeddingBagsCodegen,
        arguments: dict[str, Any],
        device: torch.device,
    ) -> None:
        on_cuda = device.type == "cuda"
        location = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
        self._tables = tables
        self._memory = "dev" if on_cuda else "host"
        self._width = tables.dims[0]
        self._with_state = tables.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
        self._device = device
        self._used = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(1, self._width, location, compute)] * len(tables.dims),
            feature_table_map=tables.feature_table_map,
            pooling_mode=tables.pooling_mode,
            device=device,
            table_names=tables.table_names,
            **arguments,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self.kernel.weights_offsets.zero_()
        self.kernel.momentum1_offsets.zero_()
        # Overrides the environment variable: slots need no bounds check.
        self.kernel.bounds_check_mode_int = BoundsCheckMode.NONE.value
        self.kernel.learning_rate_tensor = tables.learning_rate_tensor  # FBGEMM sets it in place
        self._nodes: list[Any] = []
        self.kernel.register_forward_hook(lambda _, __, output: self._nodes.append(output.grad_fn))
        self.resize(1)

    def resize(self, num_slots: int) -> None:
        """Grow the cache memory to ``num_slots`` rows. Cached rows keep their index."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the memory moves, on any stream
        weights = self._longer("weights", num_slots * self._width)
        self.weights = weights.view(num_slots, self._width)
        self.state = self._longer("momentum1", num_slots) if self._with_state else None
        # New tensors, because graphs in flight hold the old ones.
        kernel, tables = self.kernel, self._tables.feature_table_map
        num_rows = num_slots * len(self._tables.dims)
        kernel.hash_size_cumsum = kernel.hash_size_cumsum.new_tensor(
            [*(table * num_slots for table in tables), num_rows]
        )
        kernel.rows_per_table = torch.full_like(kernel.rows_per_table, num_slots)
        kernel.total_hash_size = num_slots  # as one table
        kernel.total_hash_size_bits = num_rows.bit_length()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams find the new memory
        self.num_slots = num_slots

    def follow_optimizer(self) -> None:
        """Copy optimizer options that may have changed, such as eps, to the lookup kernel."""
        self.kernel.optimizer_args = self._tables.optimizer_args

    def take_node(self) -> Any:
        """Return the autograd node of the last lookup, or None, and drop all stored nodes."""
        node = self._nodes.pop()
        self._nodes.clear()
        return node

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return copies of the rows at ``slots``: weights ``[n, dim]``, state ``[n]`` or None."""
        self.wait()
        state = None if self.state is None else self.state.index_select(0, slots)
        rows = self.weights.index_select(0, slots), state
        self.record()
        return rows

    def write(self, slots: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Copy rows into the cache memory at ``slots``, which no concurrent pass may use."""
        self.wait()
        self.weights.index_copy_(0, slots, weights.to(self._device, non_blocking=True))
        if self.state is not None and state is not None:
            self.state.index_copy_(0, slots, state.to(self._device, non_blocking=True))
        self.record()

    def wait(self) -> None:
        """Make the current CUDA stream wait for earlier uses of the cache memory."""
        if self._used is not None:
            torch.cuda.current_stream(self._device).wait_event(self._used)

    def record(self) -> None:
        """Record a use of the cache memory by the current CUDA stream."""
        if self._used is not None:
            self.wait()
            self._used.record(torch.cuda.current_stream(self._device))

    def _longer(self, name: str, size: int) -> Tensor:
        """Grow the kernel's memory in place, and return a tensor that shares this memory."""
        name = f"{name}_{self._memory}"
        old: Tensor = getattr(self.kernel, name).data
        storage = old.untyped_storage()
        storage.resize_(size * old.element_size())
        new = old.new_empty(0).set_(storage, 0, torch.Size([size]), [1])
        setattr(self.kernel, name, nn.Parameter(new) if self._memory == "host" else new)
        memory: Tensor = getattr(self.kernel, name)
        return memory.data
