"""Trains a click model on one rank, with tables in host memory, on the device, or cached."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from benchmarks._measure import Device
from benchmarks._ranks import shard, start_rank
from recd_plugin_scars.runtime.kernel import CachedKernels, cache_traffic, cached_kernels
from recd_plugin_scars.runtime.policies import CachePolicy, TableCache
from recd_plugin_scars.runtime.row_cache import CacheTraffic
from recd_plugins.api import ExactEmbeddingBagCollectionSharder
from recd_plugins.compat.lookup_kernels import close_kernels
from recd_plugins.config import TrainingSpec
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.model.cuda_graph import GraphedLoss
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.training.dense_gradients import summed_in_fixed_buckets
from recd_plugins.training.optimizer import build_optimizer

_NUM_DENSE = 13
# Small rates: larger ones amplify rounding errors, and losses are compared.
TRAINING = TrainingSpec(learning_rate=0.02, dense_learning_rate=0.01, eps=1e-3)


@dataclass(frozen=True)
class Variant:
    """Storage of a model's embedding tables.

    Tables are in host memory, with embeddings and gradients copied to and from the device
    (``host``), on the device with TorchRec's sharder (``stock``), in host memory with SCARS' row
    cache on the device (``cache``), or in FBGEMM's cache for CUDA (``uvm``). ``coalesced``
    deduplicates ids before the input dist, and ``lookahead`` prefetches rows of the next batch.
    """

    tables: Literal["host", "stock", "cache", "uvm"]
    policy: CachePolicy = "static"
    cached: bool = True
    coalesced: bool = False
    lookahead: bool = False


@dataclass(frozen=True, eq=False)
class Job:
    """Job description that is pickled and sent to the rank.

    Tables are named ``t_FEATURE``. ``bottom`` and ``top`` are the widths of DLRM's hidden dense
    layers. ``ids`` is int64 ``[batches, features, batch_size]``. ``hot_rows`` are the cached rows,
    most popular first. The first ``warmup`` batches are not timed.
    """

    rows: Mapping[str, int]
    embedding_dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    ids: NDArray[np.int64]
    hot_rows: Mapping[str, NDArray[np.int64]]
    warmup: int
    device: Device

    @property
    def features(self) -> list[str]:
        return [table.removeprefix("t_") for table in self.rows]


@dataclass(frozen=True)
class Trained:
    """Results of one variant.

    ``seconds`` has the time of each step after the warm-up. The last step includes the final
    write-back. Bytes from and to host memory, and cache counters, are sums over all steps.
    """

    losses: list[float]
    seconds: list[float]
    bytes_read: int = 0
    bytes_written: int = 0
    traffic: CacheTraffic = field(default_factory=CacheTraffic)

    @property
    def step_seconds(self) -> float:
        """Mean time of a timed step. A median would ignore occasional bursts of write-backs."""
        return statistics.fmean(self.seconds)


def measure(rank: int, world_size: int, job: Job, side: Variant) -> Trained:
    """Train one variant on all batches. Requires a single rank."""
    start_rank()
    try:
        return _train_host(job) if side.tables == "host" else _train_sharded(job, side)
    finally:
        # Pipelines and models form reference cycles; free their memory for the next variant.
        gc.collect()


def _train_host(job: Job) -> Trained:
    """Train with tables in host memory, which FBGEMM updates in the backward pass."""
    device = torch.device(job.device)
    embeddings = _HostEmbeddings(job, device)
    model = _ClickModel(job, embeddings, device)
    optimizer = torch.optim.Adagrad(model.dense.parameters(), lr=0.01, eps=TRAINING.eps)

    def step(batches: Iterator[ModelInput]) -> Tensor:
        batch = next(batches)
        optimizer.zero_grad()
        # Ids stay on the host, next to the tables.
        moved = ModelInput(
            dense_features=batch.dense_features.to(device),
            sparse_features=batch.sparse_features,
            labels=batch.labels.to(device),
        )
        loss: Tensor = model(moved)[0]
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    losses, seconds = _timed(job, step)
    return Trained(losses, seconds, embeddings.bytes_read, embeddings.bytes_written)


def _train_sharded(job: Job, side: Variant) -> Trained:
    device = torch.device(job.device)
    dmp = _sharded_model(job, side, device)
    pipeline = build_train_pipeline(dmp, build_optimizer(dmp, TRAINING), device)
    left = len(job.ids)

    def step(batches: Any) -> Tensor:
        nonlocal left
        loss: Tensor = pipeline.progress(batches)[0]
        left -= 1
        if not left:
            for kernel in cached_kernels(dmp):
                kernel.drain()
        return loss

    losses, seconds = _timed(job, step)
    counts = sum(cache_traffic(dmp).values(), CacheTraffic())
    close_kernels(dmp)
    return Trained(losses, seconds, counts.bytes_read, counts.bytes_written, counts)


def _timed(
    job: Job, step: Callable[[Iterator[ModelInput]], Tensor]
) -> tuple[list[float], list[float]]:
    """Run one step per batch. Return all losses, and the seconds of steps after the warm-up."""
    batches = iter(list(_batches(job)))  # created in advance, so reading is not timed
    losses, seconds = [], []
    for number in range(len(job.ids)):
        _synchronize(job)
        started = time.perf_counter()
        losses.append(step(batches).detach())
        _synchronize(job)
        if number >= job.warmup:
            seconds.append(time.perf_counter() - started)
    return torch.stack(losses).double().tolist(), seconds


def _synchronize(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()


def _batches(job: Job) -> Iterator[ModelInput]:
    """Yield batches of the job's ids with random dense features. Labels depend on the ids."""
    generator = torch.Generator().manual_seed(0)
    _, num_features, size = job.ids.shape
    for batch in torch.from_numpy(job.ids):
        dense = torch.rand(size, _NUM_DENSE, generator=generator)
        noise = torch.randn(size, generator=generator)
        effect = (batch[0] * 0x9E3779B1 % 1024) / 512.0 - 1
        yield ModelInput(
            dense_features=dense,
            sparse_features=KeyedJaggedTensor(
                keys=job.features,
                values=batch.flatten(),
                lengths=torch.ones(num_features * size, dtype=torch.int32),
                length_per_key=[size] * num_features,  # as the reader's batches
            ),
            labels=(effect + noise > 0).float(),
        )


class _ClickModel(nn.Module):
    def __init__(self, job: Job, embeddings: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.embeddings, self.dense = embeddings, _Dense(job, device)
        self._num_features, self._dim = len(job.rows), job.embedding_dim

    def forward(self, batch: ModelInput) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss and a tuple of loss, logits and labels, as train pipelines expect."""
        embedded: KeyedTensor = self.embeddings(batch.sparse_features)
        sparse = embedded.values().view(-1, self._num_features, self._dim)
        loss, logits = self.dense(batch.dense_features, batch.labels, sparse)
        return loss, (loss.detach(), logits, batch.labels)


class _Dense(nn.Module):
    """Dense layers with equal initial weights in each variant, replayed as CUDA graphs."""

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__()
        num_features, dim = len(job.rows), job.embedding_dim
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(TRAINING.seed)
            self.bottom = DenseArch(_NUM_DENSE, [*job.bottom, dim]).to(device)
            self.interaction = InteractionArch(num_features)
            interactions = num_features * (num_features + 1) // 2
            self.top = OverArch(dim + interactions, [*job.top, 1]).to(device)
        self._graphed = GraphedLoss()

    def forward(self, dense: Tensor, labels: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
        return self._graphed(self, self._loss, dense, labels, sparse)

    def _loss(self, dense: Tensor, labels: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.top(self.interaction(self.bottom(dense), sparse)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits.detach()


class _HostEmbeddings(nn.Module):
    """FBGEMM tables in host memory, whose embeddings are copied to a device.

    Counts the bytes of embeddings copied to the device, and of gradients copied back.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        super().__init__()
        params = fused_params(TRAINING)
        optimizer: EmbOptimType = params.pop("optimizer")
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (rows, job.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for rows in job.rows.values()
            ],
            optimizer=optimizer,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
            **params,
        )
        for number, weights in enumerate(self.kernel.split_embedding_weights()):
            _Initial(number)(weights)
        self._keys, self._dims = job.features, [job.embedding_dim] * len(job.rows)
        self._device = device
        self.bytes_read = self.bytes_written = 0

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        embedded = self.kernel(features.values(), features.offsets())
        self.bytes_read += embedded.nbytes
        embedded.register_hook(self._count_gradient)
        moved = embedded.to(self._device)
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=moved)

    def _count_gradient(self, gradient: Tensor) -> None:
        self.bytes_written += gradient.nbytes


@dataclass
class _Initial:
    """Weight initializer of one table; draws the same small values in every variant."""

    seed: int

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, weights: Tensor) -> Tensor:
        """Fill ``weights`` with the next random values and return it."""
        if weights.is_meta:
            return weights
        with torch.no_grad():
            for rows in torch.split(weights, 1 << 20):
                rows.copy_(torch.empty(rows.shape).uniform_(-0.05, 0.05, generator=self._generator))
        return weights

    def __deepcopy__(self, memo: dict[int, Any]) -> _Initial:
        return _Initial(self.seed)


def _sharded_model(job: Job, side: Variant, device: torch.device) -> DistributedModelParallel:
    """Return the model sharded table-wise on one rank."""
    configs = [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=rows,
            embedding_dim=job.embedding_dim,
            feature_names=[table.removeprefix("t_")],
            init_fn=_Initial(number),
        )
        for number, (table, rows) in enumerate(job.rows.items())
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    params = fused_params(TRAINING)
    factors = {table: len(job.hot_rows[table]) / rows for table, rows in job.rows.items()}
    sharder: ModuleSharder[nn.Module] = EmbeddingBagCollectionSharder(params)
    caches = None
    if side.tables != "stock":
        factors = factors if side.cached else dict.fromkeys(factors, 0.0)
        rows = {
            table: TableCache(
                policy=side.policy,
                load_factor=factor,
                hot_rows=job.hot_rows[table],
                lookahead=side.lookahead,
                uvm=side.tables == "uvm",
            )
            for table, factor in factors.items()
        }
        sharder = ExactEmbeddingBagCollectionSharder(
            params,
            kernels=[CachedKernels(rows)],
            coalesced=list(job.rows) if side.coalesced else (),
        )
        caches = {
            table: CacheParams(load_factor=factor, prefetch_pipeline=True)
            for table, factor in factors.items()
        }
    kernel = "fused" if side.tables == "stock" else "fused_uvm_caching"
    placed = {table: table_wise(rank=0, compute_kernel=kernel) for table in job.rows}
    model = _ClickModel(job, collection, device)
    wrapper = summed_in_fixed_buckets(always_trained=False)
    return shard(
        model, "embeddings", placed, sharder, device, caches, data_parallel_wrapper=wrapper
    )
