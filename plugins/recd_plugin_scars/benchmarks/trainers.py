"""Sides of a comparison: one model each, trained on the same batches."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recd_plugin_scars.benchmarks.model import (
    ClickModel,
    HostEmbeddings,
    Shape,
    batches,
    host_model,
    sharded_model,
)
from recd_plugin_scars.runtime.kernel import cache_traffic, cached_kernels
from recd_plugin_scars.runtime.row_cache import CacheTraffic
from recd_plugin_scars.runtime.spec import CachePolicy, TableCache
from recd_plugins.api.batches import ModelInput
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.distributed import close_kernels
from recd_plugins.api.model import build_optimizer
from recd_plugins.api.training import build_train_pipeline
from recd_plugins.testing.benchmark import keep_freed_memory


@dataclass(frozen=True)
class Side:
    """How a model's tables are kept.

    Attributes:
        tables: ``host``: in host memory, each lookup's embedding goes to the device and its
            gradient comes back; ``stock``: on the device, by TorchRec's own sharder; ``cache``:
            fast memory on the device over a slow one; ``uvm``: FBGEMM's own cache, on CUDA.
        policy: of a ``cache``.
        cached: whether any row stays in the fast memory.
        coalesced: whether ids are made unique before the input dist.
        lookahead: whether rows of the next batch are fetched while one computes.
    """

    tables: Literal["host", "stock", "cache", "uvm"]
    policy: CachePolicy = "static"
    cached: bool = True
    coalesced: bool = False
    lookahead: bool = False


@dataclass(frozen=True, eq=False)
class Job:
    """What is trained; travels to another process by pickle.

    Attributes:
        shape: of the model.
        ids: int64 ``[batches, features, batch_size * lookups]``.
        hot_rows: by table, most read first, as many as are cached.
        warmup: batches that are not timed.
        device: ``cpu`` or ``cuda``.
        lookups: of a sample, of each feature.
        seed: of dense features and labels.
        storage: of the backing store.
    """

    shape: Shape
    ids: NDArray[np.int64]
    hot_rows: Mapping[str, NDArray[np.int64]]
    warmup: int
    device: str = "cpu"
    lookups: int = 1
    seed: int = 0
    storage: Path | None = None

    @property
    def batch_size(self) -> int:
        """Samples."""
        return self.ids.shape[2] // self.lookups

    def load_factors(self) -> dict[str, float]:
        """Cached rows over rows, by table."""
        return {
            table: len(self.hot_rows[table]) / rows
            for table, rows in zip(self.shape.tables, self.shape.rows, strict=True)
        }

    def caches(self, side: Side) -> dict[str, TableCache]:
        """The caches of one side, by table."""
        return {
            table: TableCache(
                policy=side.policy,
                load_factor=factor if side.cached else 0.0,
                hot_rows=self.hot_rows[table],
                folder=self.storage,
                lookahead=side.lookahead,
            )
            for table, factor in self.load_factors().items()
        }


@dataclass(frozen=True)
class Trained:
    """One side.

    Attributes:
        losses: of every batch.
        seconds: of the steps after the warm-up; what is left to write then is in the last.
        bytes_read, bytes_written: of the backing store in all steps; of ``stock`` and ``uvm``,
            whose bytes nobody counts, 0.
        traffic: of all steps and tables; of a ``cache``.
    """

    losses: list[float]
    seconds: list[float]
    bytes_read: int
    bytes_written: int
    traffic: CacheTraffic

    @property
    def bytes(self) -> int:
        """Both ways."""
        return self.bytes_read + self.bytes_written

    @property
    def step_seconds(self) -> float:
        """The mean of timed steps: a median leaves out bursts of rows that are written back."""
        return statistics.fmean(self.seconds)

    @property
    def miss_rate(self) -> float:
        """The miss rate of the distinct rows of batches."""
        return self.traffic.misses / self.traffic.unique_rows


def measure(rank: int, world_size: int, job: Job, side: Side) -> Trained:  # noqa: ARG001
    """Train one side on all batches. Runs in a rank, the only one."""
    silence_upstream()
    keep_freed_memory()
    try:
        return _host(job) if side.tables == "host" else train_sharded(job, side)
    finally:
        # Pipelines and models are cycles; the next side wants their memory.
        gc.collect()


def _host(job: Job) -> Trained:
    device = torch.device(job.device)
    model = host_model(job.shape, device)
    return train_host(job, model)


def train_host(job: Job, model: ClickModel) -> Trained:
    """Train the uncached path, whose tables update themselves in the backward pass."""
    device = torch.device(job.device)
    embeddings = model.embeddings
    assert isinstance(embeddings, HostEmbeddings)
    training = job.shape.training
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    rate = training.dense_learning_rate or training.learning_rate
    optimizer: torch.optim.Optimizer
    if training.optimizer == "sgd":
        optimizer = torch.optim.SGD(dense, lr=rate)
    else:
        optimizer = torch.optim.Adagrad(dense, lr=rate, eps=training.eps)

    def step(batch: ModelInput) -> torch.Tensor:
        optimizer.zero_grad()
        # Ids stay on the host, where the tables are.
        moved = ModelInput(
            dense_features=batch.dense_features.to(device),
            sparse_features=batch.sparse_features,
            labels=batch.labels.to(device),
        )
        loss, _ = model(moved)
        loss.backward()
        optimizer.step()
        return loss.detach()

    timer = _Timer(job)
    for batch in _batches(job):
        timer.start()
        timer.add(step(batch))
    return Trained(
        timer.losses(),
        timer.seconds,
        embeddings.bytes_read,
        embeddings.bytes_written,
        CacheTraffic(),
    )


def train_sharded(job: Job, side: Side, ready: Callable[[], None] | None = None) -> Trained:
    """Train a side whose tables are sharded.

    Args:
        job: what is trained.
        side: how the tables are kept.
        ready: called when the tables are made.
    """
    device = torch.device(job.device)
    cached, uvm = side.tables == "cache", side.tables == "uvm"
    dmp = sharded_model(
        job.shape,
        device,
        caches=job.caches(side) if cached else None,
        coalesced=side.coalesced,
        load_factors=job.load_factors() if uvm else None,
    )
    pipeline = build_train_pipeline(dmp, build_optimizer(dmp, job.shape.training), device)
    around: Iterator[Any] = _batches(job)
    if ready is not None:
        ready()
    timer = _Timer(job)
    for left in reversed(range(len(job.ids))):
        timer.start()
        loss = pipeline.progress(around)[0]
        if not left:
            for kernel in cached_kernels(dmp):
                kernel.drain()
        timer.add(loss)
    counts = sum(cache_traffic(dmp).values(), CacheTraffic())
    # Files are gone then, whatever still holds the tables.
    close_kernels(dmp)
    return Trained(timer.losses(), timer.seconds, counts.bytes_read, counts.bytes_written, counts)


def _batches(job: Job) -> Iterator[ModelInput]:
    """Made beforehand: readers are another tier."""
    made = list(
        batches(job.shape.features, torch.from_numpy(job.ids), job.seed, lookups=job.lookups)
    )
    return iter(made)


class _Timer:
    """Times the steps after the warm-up."""

    def __init__(self, job: Job) -> None:
        self._warmup = job.warmup
        self._on_cuda = job.device == "cuda"
        self._losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def start(self) -> None:
        """Before a step."""
        if self._on_cuda:
            torch.cuda.synchronize()
        self._started = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        """After a step."""
        if self._on_cuda:
            torch.cuda.synchronize()
        if len(self._losses) >= self._warmup:
            self.seconds.append(time.perf_counter() - self._started)
        self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """The losses of every step."""
        stacked: list[float] = torch.stack(self._losses).double().tolist()
        return stacked
