"""What TorchRec's description of a kernel's tables means for its stores."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable

from recd_plugin_scars.runtime.backing_store import BackingStore
from recd_plugin_scars.runtime.open_store import open_backing_store
from recd_plugin_scars.runtime.row_cache import CachedShard
from recd_plugin_scars.runtime.spec import TableCache
from recd_plugins.api import SetupError


def describe(config: GroupedEmbeddingConfig) -> str:
    """Names of a kernel's tables, for messages."""
    return ", ".join(dict.fromkeys(table.name for table in config.embedding_tables))


def with_parameters_on_host(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """A description by which parameters and optimizer state are on the CPU of each rank."""
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
    """The backing store of a kernel: its tables below each other.

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
        if caches[table.name].storage != caches[first.name].storage:
            raise SetupError(
                f"cached tables {first.name} and {table.name} are equally wide, so that they "
                f"share a kernel, and are stored in {caches[first.name].storage} and "
                f"{caches[table.name].storage}: give them one storage"
            )
    rank = dist.get_rank(pg) if dist.is_initialized() else 0
    row, column = _offsets(first)
    return open_backing_store(
        caches[first.name].storage,
        # The first shard of a kernel is in no other.
        name=f"{first.name}.rows{row}.columns{column}.rank{rank}",
        num_rows=sum(table.local_rows for table in tables),
        dim=first.local_cols,
        with_state=(config.fused_params or {}).get("optimizer")
        == EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        shards=[_name_of_shard(table) for table in tables],
    )


def shards_of(
    config: GroupedEmbeddingConfig, caches: Mapping[str, TableCache]
) -> list[CachedShard]:
    """What is cached of this rank's part of each table of a kernel.

    Raises:
        SetupError: the hot rows are not those of the table.
    """
    shards = []
    for table in config.embedding_tables:
        cache = caches[table.name]
        hot_rows = cache.first_hot_rows(table.name, table.num_embeddings)
        first, _ = _offsets(table)
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
    """Initialises the rows of a kernel's tables, called for some after others, as TorchRec does."""
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


def _name_of_shard(table: ShardedEmbeddingTable) -> str:
    """Its table, rows and columns, in words."""
    row, column = _offsets(table)
    return (
        f"{table.name}, rows {row} to {row + table.local_rows}, "
        f"columns {column} to {column + table.local_cols}"
    )


def _offsets(table: ShardedEmbeddingTable) -> tuple[int, int]:
    """First row and first column of a shard in its table."""
    if table.local_metadata is None:
        return 0, 0
    row, column = table.local_metadata.shard_offsets
    return row, column
