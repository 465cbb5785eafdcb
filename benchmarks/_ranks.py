"""Helpers for benchmarks that train several models in the same ranks, in alternating turns."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingEnv, ShardingPlan

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.imports import silence_upstream
from recd_plugins.runtime.machine import keep_freed_memory
from recd_plugins.training.sharded_model import ShardedModel


def start_rank() -> None:
    """Prepare this process for measurements."""
    silence_upstream()
    # Otherwise the kernel zeroes the pages of each large tensor, most of all for baselines.
    keep_freed_memory()


def freeze_objects() -> None:
    """Exclude all objects so far, which are permanent, from garbage collection."""
    gc.collect()
    gc.freeze()


def first_batches(parts: ShardedModel, device: torch.device, count: int) -> list[ModelInput]:
    """Return this rank's first batches of the training split."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = parts.prepared.dataloader(rank=rank, world_size=ranks, device=device)
    return list(islice(loader, count))


def shard(
    model: nn.Module,
    path: str,
    tables: Mapping[str, Any],
    sharder: ModuleSharder[nn.Module],
    device: torch.device,
    caches: Mapping[str, CacheParams] | None = None,
    **options: Any,
) -> DistributedModelParallel:
    """Shard the embedding collection at ``path`` of a model over all ranks.

    ``tables`` maps each table to a function of ``torchrec.distributed.sharding_plan``. ``options``
    are other arguments of ``DistributedModelParallel``.
    """
    plan = construct_module_sharding_plan(
        model.get_submodule(path),
        dict(tables),
        sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=dist.get_world_size(),
        device_type=device.type,
    )
    for table, params in (caches or {}).items():
        plan[table].cache_params = params
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
        **options,
    )


class RankTrainer:
    """One sharded model on this rank, trained by a pipeline of TorchRec or of recd-plugins.

    The batches of this rank are repeated.
    """

    def __init__(self, pipeline: Any, batches: Sequence[Any], device: torch.device) -> None:
        self.batches = batches
        self._pipeline = pipeline
        self._around: Iterator[Any] = cycle(batches)
        self._device = device
        self._losses: list[Tensor] = []

    def steps(self, count: int) -> None:
        """Run ``count`` training steps and wait until they finish."""
        for _ in range(count):
            loss, _, _ = self._pipeline.progress(self._around)
            self._losses.append(loss.detach())
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def turn(self, steps: int, warmup: int = 1) -> float:
        """Return the wall seconds of one of ``steps`` steps on the slowest rank. Collective."""
        self.steps(warmup)
        dist.barrier()
        start = time.perf_counter()
        self.steps(steps)
        dist.barrier()
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent) / steps

    def losses(self) -> list[float]:
        """Return the loss of each step so far, averaged over ranks. Collective."""
        stacked = torch.stack(self._losses).double().cpu()
        dist.all_reduce(stacked)
        return (stacked / dist.get_world_size()).tolist()
