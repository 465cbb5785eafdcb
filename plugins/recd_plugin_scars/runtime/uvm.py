"""Embedding kernels with FBGEMM's UVM cache: frequent rows on the GPU, all rows in host memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_scars.runtime.policies import TableCache
from recd_plugins.api import lookup_kernels


class _Uvm(lookup_kernels.RowKernel):
    """Matches each lookup with the prefetch of its batch.

    FBGEMM (1.6 to 1.9) takes the cache slots of the oldest prefetch for every lookup. An evaluation
    or a failed step between prefetch and lookup would make it read rows of another batch.
    """

    _emb_module: Any

    def __init__(self, cache: TableCache, config: GroupedEmbeddingConfig, *more: Any) -> None:
        config.fused_params = {
            **(config.fused_params or {}),
            "cache_algorithm": CacheAlgorithm[cache.policy_name.upper()],
            "prefetch_pipeline": cache.prefetches,
        }
        super().__init__(config, *more)  # type: ignore[call-arg]
        self._prefetched: deque[tuple[Tensor, int, int, Tensor]] = deque()

    def purge(self) -> None:
        """Write changed rows back, and empty the cache. TorchRec calls this before loading."""
        self.flush()
        self.load()

    def load(self) -> None:
        """Empty the cache, because the full tables were changed."""
        tables = self._emb_module
        tables.reset_cache_states()
        tables.lxu_cache_locking_counter.zero_()
        self._prefetched.clear()

    def prefetch(self, features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        tables, ids = self._emb_module, features.values()
        if tables.prefetch_pipeline:
            varies = features.variable_stride_per_key()
            sizes = features.stride_per_key_per_rank() if varies else None
            tables.prefetch(ids, features.offsets(), forward_stream, sizes)
            slots = tables.timesteps_prefetched.pop(), tables.lxu_cache_locations_list.pop()
            self._prefetched.append((ids, ids._version, *slots))

    def forward(self, features: KeyedJaggedTensor, *more: Any, **named: Any) -> Tensor:
        tables, ids = self._emb_module, features.values()
        tables.timesteps_prefetched, tables.lxu_cache_locations_list = [], []
        for place, (of_batch, version, step, slots) in enumerate(self._prefetched):
            same_memory = of_batch.data_ptr() == ids.data_ptr() and len(of_batch) == len(ids)
            if same_memory and version == ids._version:
                for _ in range(place):  # a failed step left prefetched batches
                    self._unlock(self._prefetched.popleft()[-1])
                self._prefetched.popleft()
                tables.timesteps_prefetched, tables.lxu_cache_locations_list = [step], [slots]
                break
        rows: Tensor = super().forward(features, *more, **named)  # type: ignore[misc]
        if not rows.requires_grad:  # otherwise the backward pass unlocks the slots
            self._unlock(tables.lxu_cache_locations)
        return rows

    def _unlock(self, slots: Tensor) -> None:
        """Allow the eviction of a batch's rows. Only FBGEMM's prefetch locks slots."""
        if self._emb_module.prefetch_pipeline:
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(
                self._emb_module.lxu_cache_locking_counter, slots
            )


class UvmEmbeddingBag(_Uvm, BatchedFusedEmbeddingBag):
    """TorchRec's pooling kernel with FBGEMM's UVM cache of policy ``cache.policy``."""


class UvmEmbedding(_Uvm, BatchedFusedEmbedding):
    """TorchRec's kernel without pooling, with FBGEMM's UVM cache of policy ``cache.policy``."""
