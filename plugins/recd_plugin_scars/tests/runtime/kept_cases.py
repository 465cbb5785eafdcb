"""What ranks do with tables whose files a later run goes on with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugin_scars.runtime.kernels import CachedKernels
from recd_plugin_scars.runtime.spec import MappedFile, TableCache
from recd_plugins.distributed.lookup_kernels import close_kernels
from recd_plugins.distributed.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)
from recd_plugins.errors import DataError

KERNEL = "fused_uvm_caching"


def sharded(folder: Path, pooled: bool, placed: Any = None) -> DistributedModelParallel:
    """One table, whose first values TorchRec draws; row-wise without ``placed``."""
    sizes: dict[str, Any] = {"name": "t", "embedding_dim": 4, "num_embeddings": 10}
    table = {"feature_names": ["f"], **sizes}
    known = {"t": TableCache("lru", 0.5, storage=MappedFile(folder, keep=True))}
    sgd = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    module: EmbeddingBagCollection | EmbeddingCollection
    sharder: ExactEmbeddingBagCollectionSharder | ExactEmbeddingCollectionSharder
    if pooled:
        module = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table)])
        sharder = ExactEmbeddingBagCollectionSharder(sgd, kernels=[CachedKernels(known)])
    else:
        module = EmbeddingCollection(tables=[EmbeddingConfig(**table)])
        sharder = ExactEmbeddingCollectionSharder(sgd, kernels=[CachedKernels(known)])
    plan = construct_module_sharding_plan(
        module,
        {"t": placed or row_wise(compute_kernel=KERNEL)},
        sharder,
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    plan["t"].cache_params = CacheParams(load_factor=0.5, prefetch_pipeline=True)
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def fill(dmp: DistributedModelParallel, value: float) -> None:
    """Set this rank's rows, as a state dict that is loaded in place does."""
    (table,) = dmp.state_dict().values()
    for shard in table.local_shards():
        shard.tensor.detach().fill_(value)


def contents(folder: Path) -> dict[Path, bytes | None]:
    """What is in a folder, by path."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def lost(rank: int, world_size: int, folder: Path) -> tuple[str, bool]:
    """What a run is refused with whose rank 1 has a new disk, and whether disks stay the same."""
    disk = folder / f"node{rank}"
    first = sharded(disk, pooled=True)
    fill(first, rank + 1.0)
    close_kernels(first)
    if rank == 1:
        shutil.rmtree(disk)
    return _refused(disk, True, row_wise(compute_kernel=KERNEL))


def moved(rank: int, world_size: int, folder: Path) -> tuple[str, bool]:
    """The same of a table that another rank had."""
    first = sharded(folder, pooled=False, placed=table_wise(rank=0, compute_kernel=KERNEL))
    fill(first, rank + 1.0)
    close_kernels(first)
    dist.barrier()
    return _refused(folder, False, table_wise(rank=1, compute_kernel=KERNEL))


def _refused(folder: Path, pooled: bool, placed: Any) -> tuple[str, bool]:
    before, said = contents(folder), ""
    dist.barrier()
    try:
        sharded(folder, pooled, placed)
    except DataError as error:
        said = str(error)
    dist.barrier()
    return said, contents(folder) == before
