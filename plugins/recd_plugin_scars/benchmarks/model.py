"""One click model over tables that live on the host, or are sharded, with and without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recd_plugin_scars.runtime.kernel import CachedKernels
from recd_plugin_scars.runtime.spec import TableCache
from recd_plugins.api import ExactEmbeddingBagCollectionSharder
from recd_plugins.api.batches import ModelInput
from recd_plugins.api.distributed import fused_params
from recd_plugins.api.registry import TrainingSpec

NUM_DENSE = 13


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        features: with one table each, ``t_FEATURE``.
        rows: of the table of each.
        embedding_dim: scalars of a row.
        bottom, top: widths of DLRM's dense layers; without ``embedding_dim`` and 1, their last.
        training: optimizer and rates.
    """

    features: tuple[str, ...]
    rows: tuple[int, ...]
    embedding_dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    training: TrainingSpec

    @property
    def tables(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(f"t_{feature}" for feature in self.features)


class ClickModel(nn.Module):
    """DLRM around embeddings of any kind.

    Args:
        shape: of the model; dense weights are the same each time.
        embeddings: of ``sparse_features``.
        device: of the dense layers.
    """

    def __init__(self, shape: Shape, embeddings: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.embeddings = embeddings
        num_features = len(shape.features)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(shape.training.seed)
            self.bottom = DenseArch(NUM_DENSE, [*shape.bottom, shape.embedding_dim]).to(device)
            self.interaction = InteractionArch(num_features)
            interactions = num_features * (num_features + 1) // 2
            self.top = OverArch(shape.embedding_dim + interactions, [*shape.top, 1]).to(device)
        self._features = list(shape.features)
        self._dim = shape.embedding_dim

    def forward(self, batch: ModelInput) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Loss, and loss, logits and labels, which train pipelines hand on."""
        embedded: KeyedTensor = self.embeddings(batch.sparse_features)
        sparse = embedded.values().view(-1, len(self._features), self._dim)
        logits = self.top(self.interaction(self.bottom(batch.dense_features), sparse)).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


class HostEmbeddings(nn.Module):
    """The uncached path: stock FBGEMM tables in host memory, whose embeddings go to a device.

    Every lookup's embedding leaves the host and its gradient comes back, which is counted. FBGEMM
    applies the gradients in the backward pass.

    Args:
        shape: of the tables.
        device: of what is looked up.
        weights: of all tables, float32 in one dimension, to be used in place of memory of FBGEMM's.

    Attributes:
        bytes_read: of embeddings that left the host.
        bytes_written: of gradients that came back.
    """

    def __init__(self, shape: Shape, device: torch.device, weights: Tensor | None = None) -> None:
        super().__init__()
        params = fused_params(shape.training)
        if weights is not None:
            params["preallocated_host_buffers"] = {"weights": weights}
        optimizer: EmbOptimType = params.pop("optimizer")
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (rows, shape.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for rows in shape.rows
            ],
            optimizer=optimizer,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
            **params,
        )
        self._keys = list(shape.features)
        self._dims = [shape.embedding_dim] * len(shape.features)
        self._device = device
        self.bytes_read = self.bytes_written = 0

    def initialise(self) -> None:
        """Give the tables the weights that all sides start from."""
        for number, weights in enumerate(self.kernel.split_embedding_weights()):
            Initial(number)(weights)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Embeddings on the device."""
        embedded = self.kernel(features.values(), features.offsets())
        self.bytes_read += embedded.nbytes
        if embedded.requires_grad:
            embedded.register_hook(self._count_gradient)
        moved = embedded.to(self._device)
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=moved)

    def _count_gradient(self, gradient: Tensor) -> None:
        self.bytes_written += gradient.nbytes


@dataclass
class Initial:
    """First weights of a table, the same on every side: small, and of a table's own seed."""

    seed: int
    bound: float = 0.05

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, weights: Tensor) -> Tensor:
        """Fill rows, which follow those of the call before."""
        if weights.is_meta:
            return weights
        with torch.no_grad():
            if weights.device.type == "cpu":
                return weights.uniform_(-self.bound, self.bound, generator=self._generator)
            for rows in torch.split(weights, 1 << 20):
                drawn = torch.empty(rows.shape)
                rows.copy_(drawn.uniform_(-self.bound, self.bound, generator=self._generator))
        return weights

    def __deepcopy__(self, memo: dict[int, Any]) -> Initial:
        return Initial(self.seed, self.bound)


def host_model(shape: Shape, device: torch.device) -> ClickModel:
    """The uncached path."""
    embeddings = HostEmbeddings(shape, device)
    embeddings.initialise()
    return ClickModel(shape, embeddings, device)


def sharded_model(
    shape: Shape,
    device: torch.device,
    *,
    caches: Mapping[str, TableCache] | None = None,
    coalesced: bool = False,
    load_factors: Mapping[str, float] | None = None,
) -> DistributedModelParallel:
    """The same in a DistributedModelParallel on one rank, every table of it whole.

    Args:
        shape: of the model.
        device: of dense layers and lookups.
        caches: of all tables; without them and without ``load_factors`` it is TorchRec's own
            sharder with tables on the device.
        coalesced: ids are made unique before the input dist.
        load_factors: of all tables, for FBGEMM's own UVM caching, on CUDA alone.
    """
    configs = [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=rows,
            embedding_dim=shape.embedding_dim,
            feature_names=[feature],
            init_fn=Initial(number),
        )
        for number, (table, feature, rows) in enumerate(
            zip(shape.tables, shape.features, shape.rows, strict=True)
        )
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    params = fused_params(shape.training)
    sharder: ModuleSharder[nn.Module]
    if caches or coalesced:
        sharder = ExactEmbeddingBagCollectionSharder(
            params,
            kernels=[CachedKernels(caches or {})],
            coalesced=shape.tables if coalesced else (),
        )
    else:
        sharder = EmbeddingBagCollectionSharder(params)
    factors = load_factors or {name: cache.load_factor for name, cache in (caches or {}).items()}
    kernel = "fused_uvm_caching" if factors else "fused"
    module_plan = construct_module_sharding_plan(
        collection,
        {table: table_wise(rank=0, compute_kernel=kernel) for table in shape.tables},
        sharder,
        local_size=1,
        world_size=1,
        device_type=device.type,
    )
    for table, factor in factors.items():
        module_plan[table].cache_params = CacheParams(load_factor=factor, prefetch_pipeline=True)
    return DistributedModelParallel(
        ClickModel(shape, collection, device),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"embeddings": module_plan}),
        sharders=[sharder],
    )


def batches(
    features: Sequence[str], ids: Tensor, seed: int, lookups: int = 1
) -> Iterator[ModelInput]:
    """Batches around ids, with dense features and labels that the ids have a say in.

    Args:
        features: in the order of ``ids``.
        ids: int64 ``[batches, features, batch_size * lookups]``.
        seed: of the rest.
        lookups: of a sample, of each feature.
    """
    generator = torch.Generator().manual_seed(seed)
    size = ids.shape[2] // lookups
    for batch in ids:
        dense = torch.rand(size, NUM_DENSE, generator=generator)
        noise = torch.randn(size, generator=generator)
        effect = (batch[0].view(size, lookups)[:, 0] * 0x9E3779B1 % 1024) / 512.0 - 1
        yield ModelInput(
            dense_features=dense,
            sparse_features=KeyedJaggedTensor(
                keys=list(features),
                values=batch.flatten(),
                lengths=torch.full((len(features) * size,), lookups, dtype=torch.int32),
            ),
            labels=(effect + noise > 0).float(),
        )
