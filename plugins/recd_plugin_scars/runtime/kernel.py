"""Embedding kernels that cache frequent rows of tables in host memory or files."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_scars.runtime.policies import TableCache
from recd_plugin_scars.runtime.row_cache import CachedBatch, CacheTraffic, RowCache
from recd_plugin_scars.runtime.stores import RowMover
from recd_plugin_scars.runtime.tables import (
    FastMemory,
    FlushingOptimizer,
    TablesInBackingStore,
    as_planned,
    fbgemm_arguments,
    first_values,
    open_store,
    shards_of,
    table_names,
    with_parameters_on_host,
)
from recd_plugin_scars.runtime.uvm import UvmEmbedding, UvmEmbeddingBag
from recd_plugins.api import (
    ExactnessError,
    LookupKernels,
    jagged,
    lookup_kernels,
    portable_kernels,
)


class _FastBags(portable_kernels.PortableEmbeddingBag):
    """Pooling kernel over the cache memory. Its ids are row indices of the cache memory."""

    def __init__(self, kernel: Any, *base: Any) -> None:
        BaseBatchedEmbeddingBag.__init__(self, *base)
        self._emb_module = kernel

    def forward(
        self,
        features: KeyedJaggedTensor,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        forward = super().forward if features.device().type == "cpu" else self._stock_forward
        return forward(features, vbe_output, vbe_output_offsets)

    _stock_forward = BatchedFusedEmbeddingBag.forward


class _FastRows(portable_kernels.PortableEmbedding):
    """Unpooled lookup kernel that reads from the cache memory. Ids are rows of this memory."""

    def __init__(self, kernel: Any, *base: Any) -> None:
        BaseBatchedEmbedding.__init__(self, *base)
        self._emb_module = kernel

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        forward = super().forward if features.device().type == "cpu" else self._stock_forward
        return forward(features)

    _stock_forward = BatchedFusedEmbedding.forward


class _Cached(lookup_kernels.RowKernel):
    """Base class of the cached kernels with and without pooling."""

    # Attributes of TorchRec's base classes.
    _config: GroupedEmbeddingConfig
    _pg: Any
    _local_rows: list[int]
    _local_cols: list[int]
    _feature_table_map: list[int]
    training: bool

    _is_closed = False

    def _open_stores(
        self, device: torch.device | None, caches: Mapping[str, TableCache], pooling_mode: Any
    ) -> None:
        device = device or torch.device("cpu")
        config = self._config
        arguments = fbgemm_arguments(config, device)
        self._slow = open_store(config, caches, self._pg)
        self._mover = RowMover(self._slow, pin=device.type == "cuda")
        self._emb_module = TablesInBackingStore(
            config,
            list(zip(self._local_rows, self._local_cols, strict=True)),
            self._feature_table_map,
            pooling_mode,
            self._slow,
            arguments,
        )
        self._prefetches = any(caches[table.name].lookahead for table in config.embedding_tables)
        self._fast = FastMemory(self._emb_module, arguments, device)
        self._rows = RowCache(shards_of(config, caches), self._fast, self._mover)
        self._prefetched: deque[tuple[Tensor, int, list[int], CachedBatch]] = deque()
        self._optim = FlushingOptimizer(
            flush=self.flush,
            load=self.load,
            config=config,
            emb_module=self._emb_module,
            pg=self._pg,
        )
        self.init_parameters()

    def init_parameters(self) -> None:
        """Initialise all rows with the same values as TorchRec's uncached kernel."""
        self._slow.fill(first_values(self._config))

    def flush(self) -> None:
        """Write changed rows back to host memory or files. Cached rows are reloaded before use."""
        self._rows.flush()

    def drain(self) -> None:
        """Wait until all evicted rows are written back to host memory or files."""
        self._mover.drain()

    def purge(self) -> None:
        """Write changed rows back. TorchRec calls this before loading a state dict."""
        self._rows.flush()

    def set_rows(self, table: int, rows: Tensor, weights: Tensor) -> None:
        feature = self._feature_table_map.index(table)
        sizes = [0] * len(self._feature_table_map)
        sizes[feature] = len(rows)
        batch = self._rows.admit(rows, sizes, self._feature_table_map)
        self._rows.land(batch)
        self._fast.write(batch.slot_of_id, weights, torch.zeros(len(rows)))
        self._rows.release(batch, changed=True)

    def load(self) -> None:
        """Reload the cached rows after the full table (the backing store) was changed."""
        self._rows.load()

    def close(self) -> None:
        """Write changed rows back, and close the table's files. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.flush()
            self._mover.close()
            self._slow.close()

    def traffic(self) -> Iterator[tuple[str, CacheTraffic]]:
        """Yield the name and the cache traffic of each table's shard."""
        for table, traffic in zip(self._config.embedding_tables, self._rows.traffic, strict=True):
            yield table.name, traffic

    def train(self, mode: bool = True) -> Self:
        """Set training mode. Traffic is counted only in training mode."""
        self._rows.is_counting = mode
        super().train(mode)  # type: ignore[misc]
        return self

    def _look_up(
        self, features: KeyedJaggedTensor, looked_up: Callable[[KeyedJaggedTensor], Tensor]
    ) -> Tensor:
        batch = self._take_prefetched(features) or self._admit(features)
        self._rows.land(batch)
        self._fast.follow_optimizer()
        self._fast.wait()
        try:
            output = looked_up(jagged.with_fields(features, values=batch.slot_of_id))
        except BaseException:
            self._rows.release(batch, changed=False)
            raise
        self._fast.record()
        node = self._fast.take_node()
        if node is None:
            self._rows.release(batch, changed=False)
        else:
            self._release_after(node, batch)
        return output

    def _release_after(self, node: Any, batch: CachedBatch) -> None:
        """Allow eviction of a batch's rows after its backward pass, or if its graph is freed."""
        rows, fast = self._rows, self._fast

        def prepare(*_: Any) -> None:
            if batch.is_released:
                raise ExactnessError(
                    f"cached tables {table_names(self._config)} support only one backward pass per "
                    "lookup. Combine the losses into one backward pass, or remove these tables "
                    "from the cache: entry."
                )
            rows.land(batch)  # the backing store may have changed since the forward pass
            fast.wait()

        def release(*_: Any) -> None:
            fast.record()
            rows.release(batch, changed=True)

        node.register_prehook(prepare)
        node.register_hook(release)
        # The node owns the hook. Nothing else may hold a reference to it.
        weakref.finalize(release, rows.abandon, batch).atexit = False

    def prefetch(self, features: KeyedJaggedTensor, forward_stream: Any = None) -> None:  # noqa: ARG002
        """Start to fetch the rows of a batch, in the training thread."""
        if self._prefetches:
            batch, ids = self._admit(features), features.values()
            # The bounds check may copy the ids. This reference prevents reuse of their memory.
            self._prefetched.append((ids, ids._version, features.length_per_key(), batch))

    def _take_prefetched(self, features: KeyedJaggedTensor) -> CachedBatch | None:
        """Return the prefetched batch with the same id tensor, or None if the ids changed."""
        values = features.values()
        for place, (ids, version, ids_per_feature, batch) in enumerate(self._prefetched):
            if ids.data_ptr() == values.data_ptr() and len(ids) == len(values):
                for _ in range(place):  # a failed step left prefetched batches
                    *_, dropped = self._prefetched.popleft()
                    self._rows.release(dropped, changed=False)
                del self._prefetched[0]
                if version == values._version and ids_per_feature == features.length_per_key():
                    return batch
                self._rows.release(batch, changed=False)
                return None
        return None

    def _admit(self, features: KeyedJaggedTensor) -> CachedBatch:
        """Check the bounds of ids like FBGEMM, and start to fetch their rows, on the CPU."""
        sizes = features.length_per_key()
        ids = features.values().cpu().to(self._emb_module.embedding_table_index_type)
        bounds = torch.tensor([0, *sizes]).cumsum(0)
        ids, _, _, _ = self._emb_module.prepare_inputs(ids, bounds)
        return self._rows.admit(ids, sizes, self._feature_table_map)


class CachedEmbeddingBag(_Cached, BatchedFusedEmbeddingBag):
    """Fused pooling kernel with a cache of frequent rows. All tables have the same width.

    Parameters and optimizer state have the names and shapes of TorchRec's kernel, and share memory
    with the backing store (host memory or files). Call ``flush`` before reading them and ``load``
    after writing them. Outputs and gradients equal those of the uncached kernel.

    Args:
        caches: cache of each table, keyed by table name. May contain other tables. All other
            arguments are TorchRec's.

    Raises:
        SetupError: the tables cannot be cached, or differ in width or backing store.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
        *,
        caches: Mapping[str, TableCache],
    ) -> None:
        # Skips the fused base's constructor, which would allocate the tables on the device.
        config = with_parameters_on_host(config)
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device, sharding_type)
        self._open_stores(device, caches, self._pooling)
        fast = _FastBags(self._fast.kernel, config, pg, device, sharding_type)
        self._fast_kernel = (fast,)  # in a tuple, so that it is not a submodule

    def forward(
        self,
        features: KeyedJaggedTensor,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        return self._look_up(
            features, lambda slots: self._fast_kernel[0](slots, vbe_output, vbe_output_offsets)
        )


class CachedEmbedding(_Cached, BatchedFusedEmbedding):
    """Fused kernel without pooling, with a cache of frequent rows like ``CachedEmbeddingBag``."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        *,
        caches: Mapping[str, TableCache],
    ) -> None:
        config = with_parameters_on_host(config)
        BaseBatchedEmbedding.__init__(self, config, pg, device)
        self._open_stores(device, caches, PoolingMode.NONE)
        self._fast_kernel = (_FastRows(self._fast.kernel, config, pg, device),)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self._look_up(features, self._fast_kernel[0])


class CachedKernels(LookupKernels):
    """Creates cached kernels for tables planned with the compute kernel ``fused_uvm_caching``.

    Args:
        caches: cache of each table, keyed by table name.
    """

    compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value

    def __init__(self, caches: Mapping[str, TableCache]) -> None:
        self._caches = dict(caches)

    @property
    def tables(self) -> Mapping[str, TableCache]:
        return self._caches

    def bags(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> CachedEmbeddingBag | UvmEmbeddingBag:
        if (cache := self._of_group(config)).uvm:
            return UvmEmbeddingBag(cache, config, pg, device, sharding_type)
        return CachedEmbeddingBag(config, pg, device, sharding_type, caches=self._caches)

    def sequences(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None
    ) -> CachedEmbedding | UvmEmbedding:
        if (cache := self._of_group(config)).uvm:
            return UvmEmbedding(cache, config, pg, device)
        return CachedEmbedding(config, pg, device, caches=self._caches)

    def _of_group(self, config: GroupedEmbeddingConfig) -> TableCache:
        return self._caches[config.embedding_tables[0].name]

    def as_planned(
        self, params: Mapping[str, ParameterSharding], configs: Iterable[BaseEmbeddingConfig]
    ) -> CachedKernels:
        return CachedKernels(as_planned(self._caches, params, configs))

    def prefetches(self, table: str) -> bool:
        return self._caches[table].prefetches


def cached_kernels(module: nn.Module) -> Iterator[CachedEmbeddingBag | CachedEmbedding]:
    """Yield the cached kernels in a sharded module on this rank."""
    for kernel in lookup_kernels.row_kernels(module):
        if isinstance(kernel, CachedEmbeddingBag | CachedEmbedding):
            yield kernel


def cache_traffic(module: nn.Module) -> dict[str, CacheTraffic]:
    """Return a dict from cached table to this rank's traffic, counted in training mode."""
    total: dict[str, CacheTraffic] = {}
    for kernel in cached_kernels(module):
        for table, traffic in kernel.traffic():
            total[table] = total.get(table, CacheTraffic()) + traffic
    return total
