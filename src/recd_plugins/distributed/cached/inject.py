"""Puts cached kernels into TorchRec's lookups while these are constructed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.types import ParameterSharding, ShardingType

from recd_plugins.distributed.cached.kernel import CachedEmbedding, CachedEmbeddingBag
from recd_plugins.distributed.cached.spec import TableCache
from recd_plugins.distributed.torchrec_internals import require_attributes
from recd_plugins.errors import SetupError

_CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING


def kernels_with_cache(
    caches: Mapping[str, TableCache], sharding_type: str, kernels: list[str]
) -> list[str]:
    """Compute kernels for a sharding type: TorchRec has the cached one on CUDA only."""
    if not caches or sharding_type == ShardingType.DATA_PARALLEL.value or _CACHED.value in kernels:
        return kernels
    return [*kernels, _CACHED.value]


def check_caches(
    caches: Mapping[str, TableCache],
    params: Mapping[str, ParameterSharding],
    device: torch.device | None,
) -> None:
    """Refuse a plan that would leave out a table's cache, or ask for one that is not there.

    Args:
        caches: by table, those of other modules too.
        params: how each table of one module is sharded.
        device: of the module; TorchRec's own cached kernel needs CUDA.

    Raises:
        SetupError: names the table and what to change.
    """
    on_cuda = device is not None and device.type == "cuda"
    for table, sharding in params.items():
        if table in caches and sharding.compute_kernel != _CACHED.value:
            raise SetupError(
                f"table {table} has a cache, and its plan the kernel {sharding.compute_kernel} "
                f"({sharding.sharding_type}), which has none: plan it with the kernel "
                f"{_CACHED.value}, or give it no cache"
            )
        if sharding.compute_kernel == _CACHED.value and table not in caches and not on_cuda:
            raise SetupError(
                f"table {table} is planned with the kernel {_CACHED.value}, which TorchRec has on "
                f"CUDA only, and the sharder knows no cache of it: give it caches={{{table!r}: "
                "TableCache(...)}, or plan the table with the kernel fused"
            )


@contextmanager
def cached_lookups(caches: Mapping[str, TableCache]) -> Iterator[None]:
    """While it is open, lookups that are constructed get cached kernels for tables with a cache.

    A stock kernel would allocate the whole table on the device, so that it cannot be replaced
    afterwards. TorchRec has no other place to say which kernel to make.

    Raises:
        SetupError: TorchRec has other internals than 1.6 to 1.9.
    """
    if not caches:
        yield
        return
    # Private, torchrec 1.6 to 1.9: what makes the kernel of a group of tables.
    require_attributes(GroupedPooledEmbeddingsLookup, "_create_embedding_kernel")
    require_attributes(GroupedEmbeddingsLookup, "_create_embedding_kernel")
    stock_bags = GroupedPooledEmbeddingsLookup._create_embedding_kernel
    stock = GroupedEmbeddingsLookup._create_embedding_kernel

    def bags(
        lookup: GroupedPooledEmbeddingsLookup,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: Any,
        sharding_type: ShardingType | None,
        env: Any,
    ) -> nn.Module:
        if not _has_cache(config, caches):
            return stock_bags(lookup, config, device, pg, sharding_type, env)
        return CachedEmbeddingBag(config, pg, device, sharding_type, caches=caches)

    def sequences(
        lookup: GroupedEmbeddingsLookup,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        env: Any = None,
    ) -> nn.Module:
        if not _has_cache(config, caches):
            return stock(lookup, config, pg, device, env)
        require_attributes(lookup, "_need_prefetch")
        lookup._need_prefetch = True
        return CachedEmbedding(config, pg, device, caches=caches)

    GroupedPooledEmbeddingsLookup._create_embedding_kernel = bags
    GroupedEmbeddingsLookup._create_embedding_kernel = sequences
    try:
        yield
    finally:
        GroupedPooledEmbeddingsLookup._create_embedding_kernel = stock_bags
        GroupedEmbeddingsLookup._create_embedding_kernel = stock


def _has_cache(config: GroupedEmbeddingConfig, caches: Mapping[str, TableCache]) -> bool:
    """Whether the tables of a kernel are cached.

    Raises:
        SetupError: some are and some are not.
    """
    tables: list[ShardedEmbeddingTable] = config.embedding_tables
    if not any(table.local_rows for table in tables):
        return False  # as row-wise tables with few rows have it on some ranks
    cached = [table.name for table in tables if table.name in caches]
    if cached and len(cached) < len(tables):
        other = next(table.name for table in tables if table.name not in caches)
        raise SetupError(
            f"tables {cached[0]}, which has a cache, and {other}, which has none, got one kernel: "
            "plan cached tables with CacheParams(prefetch_pipeline=True), by which TorchRec keeps "
            "them apart"
        )
    return bool(cached)
