"""A trainer's model, and its batches, which are deduplicated though they are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from tests.sharded import CPU, bags, local_weights, sequences, sharded
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import recd_plugins
from recd_plugins.drop_in import dedup
from recd_plugins.sharding.pipeline import build_train_pipeline

FEATURES = ["f0", "f1", "f2"]
ROWS, DIM, BATCH, NUM_STEPS = 30, 8, 12, 3


@contextmanager
def forced_dedup() -> Iterator[None]:
    """Have ``dedup`` decide as if lookups cost more than anything else; also a decorator."""
    pays = dedup._pays
    dedup._pays = lambda whole, ranks: True
    try:
        yield
    finally:
        dedup._pays = pays


class OnCpu(Pipelineable):
    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        raise AssertionError("no streams on CPU")

    def pin_memory(self) -> Self:
        return self


@dataclass
class Sample(OnCpu):
    sparse: KeyedJaggedTensor
    more: dict[str, KeyedJaggedTensor]
    labels: Tensor


def sharded_side(ready: recd_plugins.Wrapped, params: dict[str, Any], stock: bool) -> Any:
    """Shard a model by one plan, with TorchRec's sharders or with those of this library."""
    ours: Any = ready.sharders(fused_params=params)
    kinds = EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
    plan = ready.planner(world_size=dist.get_world_size()).plan(ready.model, ours)
    return sharded(ready.model, plan, [k(dict(params)) for k in kinds] if stock else ours, CPU)


def pipeline_of(dmp: nn.Module, learning_rate: float, stock: bool) -> Any:
    """Return a pipeline. Ours raises where an embedding module is not pipelined."""
    dense = [p for p in dmp.parameters() if not hasattr(p, "_in_backward_optimizers")]
    make: Any = TrainPipelineSparseDist if stock else build_train_pipeline
    return make(dmp, torch.optim.SGD(dense, lr=learning_rate), CPU)


def tables_here(dmp: nn.Module) -> dict[str, Tensor]:
    """Return this rank's weights by table, wherever the model has it."""
    return {".".join(n.split(".")[-2:]): tensor for n, tensor in local_weights(dmp).items()}


class Model(nn.Module):
    def __init__(self, sequence: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = bags(*FEATURES, rows=ROWS, dim=DIM, means=["f1"])
        self.sequences = sequences("f2", rows=ROWS, dim=DIM) if sequence else None

    def forward(self, batch: Sample) -> Tensor:
        vectors = self.bags(batch.sparse)
        found = torch.cat([vectors[name] for name in FEATURES], dim=1).sum(dim=1)
        if self.sequences is not None:
            rows = self.sequences(batch.sparse)["f2"]
            row_of = torch.arange(len(found)).repeat_interleave(rows.lengths().long())
            found = found.index_add(0, row_of, rows.values().sum(dim=1))
        return (found - batch.labels).square().mean()


def loader(rank: int, sessions: bool, num_batches: int = NUM_STEPS) -> Iterator[Sample]:
    """Batches of rows of which four are equal each, or none; rank 1's last one has no row."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(num_batches):
        rows = 0 if rank and step and step == num_batches - 1 else BATCH
        distinct = rows // 4 if sessions else rows
        values, counts = [torch.zeros(0, dtype=torch.long)], []
        for _ in FEATURES:
            lengths = torch.randint(1, 4, (distinct,), generator=generator).tolist()
            lists = [torch.randint(ROWS, (length,), generator=generator) for length in lengths]
            every = [lists[row % distinct] for row in range(rows)]
            values += every
            counts += [len(ids) for ids in every]
        sparse = KeyedJaggedTensor(
            FEATURES, torch.cat(values), lengths=torch.tensor(counts, dtype=torch.long), stride=rows
        )
        alone = KeyedJaggedTensor(["x"], torch.arange(rows), lengths=torch.ones(rows).int())
        yield Sample(sparse, {"x": alone}, torch.rand(rows, generator=generator))
