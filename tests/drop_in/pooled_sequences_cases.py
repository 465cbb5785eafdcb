"""A trainer that pools sequences, by hand with stock TorchRec and by PooledSequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.sharded import CPU, bags, local_weights, sequences, sharded
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import recd_plugins
from recd_plugins import PooledSequences
from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.distributions import zipf
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding.byte_counter import lookup_ids
from recd_plugins.sharding.pipeline import build_train_pipeline

#: Of each feature, how many rows follow one another with the same ids.
RUNS = {"bag": 4, "items": 4, "actions": 2, "alone": 1}
SEQUENCES = ["items", "actions", "alone"]
ROWS, DIM, BATCH, NUM_STEPS = 40, 8, 12, 4


@dataclass
class Batch(Pipelineable):
    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.sparse.to(device), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        raise AssertionError("no streams on CPU")

    def pin_memory(self) -> Batch:
        return self


class Newest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, items: JaggedTensor, actions: JaggedTensor) -> Tensor:
        newest = self.linear(items.to_padded_dense(2))
        mean = actions.to_padded_dense(4).mean(dim=1)
        return newest * mean.unsqueeze(1).sigmoid()


class Mean(nn.Module):
    def forward(self, rows: JaggedTensor) -> Tensor:
        summed = torch.segment_reduce(rows.values(), "sum", lengths=rows.lengths().long())
        return summed / rows.lengths().clamp(min=1).unsqueeze(1)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = bags("bag", rows=ROWS, dim=DIM)
        self.sequences = sequences(*SEQUENCES, rows=ROWS, dim=DIM)
        self.newest, self.mean = Newest(), Mean()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.sequences(batch.sparse)
        newest = self.newest(found["items"], found["actions"])
        return loss_of(
            self.bags(batch.sparse),
            newest,
            self.mean(found["items"]),
            self.mean(found["alone"]),
            batch.labels,
        )


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = bags("bag", rows=ROWS, dim=DIM)
        self.histories = PooledSequences(
            sequences(*SEQUENCES, rows=ROWS, dim=DIM),
            {("items", "actions"): Newest(), "items": Mean(), "alone": "recd.mean"},
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.histories(batch.sparse)
        return loss_of(
            self.bags(batch.sparse),
            pooled["items", "actions"],
            pooled["items"],
            pooled["alone"],
            batch.labels,
        )


@torch.fx.wrap
def loss_of(
    bags: Any, newest: Tensor, items: Tensor, alone: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    vectors = [bags["bag"], newest.flatten(1), items, alone]
    loss = (torch.cat(vectors, dim=1).square().sum(dim=1) - labels).square().mean()
    return loss, loss.detach()


def batches(rank: int, num_batches: int = NUM_STEPS) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(rank)
    for _ in range(num_batches):
        lists: list[Tensor] = []
        for run in RUNS.values():
            for length in torch.randint(0, 5, (BATCH // run,), generator=random).tolist():
                lists += [torch.randint(ROWS, (length,), generator=random)] * run
        lengths = torch.tensor([len(ids) for ids in lists])
        kjt = KeyedJaggedTensor(list(RUNS), torch.cat(lists), lengths=lengths)
        yield Batch(kjt, torch.rand(BATCH, generator=random))


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    ids: int


def train(make: type[nn.Module], deduplicated: bool, stock: bool, world_size: int) -> Trained:
    model, params = make(), {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.02}
    ready = recd_plugins.wrap(model)
    ours: Any = ready.sharders(fused_params=params)
    theirs: Any = [
        EmbeddingBagCollectionSharder(dict(params)),
        EmbeddingCollectionSharder(dict(params)),
    ]
    plan = ready.planner(world_size=world_size).plan(model, ours)
    dmp = sharded(model, plan, theirs if stock else ours, CPU)
    dense = [p for p in dmp.parameters() if not hasattr(p, "_in_backward_optimizers")]
    # Ours raises where an embedding module is not pipelined.
    make_pipeline: Any = TrainPipelineSparseDist if stock else build_train_pipeline
    pipeline = make_pipeline(dmp, torch.optim.SGD(dense, lr=0.02), CPU)
    loader: Any = list(batches(dist.get_rank()))
    source = chain(ready.dedup(loader) if deduplicated else loader, batches(7, 1))
    with lookup_ids(dmp) as counted:
        losses = [float(pipeline.progress(source)) for _ in range(NUM_STEPS + 1)]
    found = {".".join(n.split(".")[-2:]): tensor for n, tensor in local_weights(dmp).items()}
    return Trained(losses, found, counted.total)


def write_registry(folder: Path, text: str, tables: Iterable[str]) -> Path:
    accesses = {f"t_{n}": zipf(f"t_{n}", ROWS, 4.0, 1.1, features=(n,)) for n in tables}
    AccessProfile(accesses, "Zipf's law").save(folder / "accesses.parquet")
    path = folder / "registry.yaml"
    path.write_text(text.format(profile=folder / "accesses.parquet"), encoding="utf-8")
    return path


def drop_in(
    registry: Path | None, params: Mapping[str, Any] | None = None
) -> tuple[recd_plugins.Wrapped, DistributedModelParallel]:
    ready = recd_plugins.wrap(Wrapped(), registry)
    sharders = ready.sharders(fused_params=params)
    plan = ready.planner().collective_plan(ready.model, sharders, dist.group.WORLD)
    return ready, sharded(ready.model, plan, sharders, CPU)


def three_ways(rank: int, world_size: int) -> list[Trained]:
    return [
        train(ByHand, deduplicated=False, stock=True, world_size=world_size),
        train(Wrapped, deduplicated=False, stock=False, world_size=world_size),
        train(Wrapped, deduplicated=True, stock=False, world_size=world_size),
    ]


def clipped(rank: int, world_size: int) -> list[str]:
    ready, dmp = drop_in(None, {"gradient_clipping": True})
    (batch,) = batches(rank, 1)
    said = []
    for each in (ready.dedup.batch(batch), batch):
        try:
            dmp(each)[0].sum().backward()
            said.append("")
        except ExactnessError as error:
            said.append(str(error))
    return said
