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
from tests.drop_in.trainer import OnCpu, pipeline_of, sharded_side, tables_here
from tests.sharded import CPU, bags, sequences, sharded
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import recd_plugins
from recd_plugins import PooledSequences
from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.distributions import zipf
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding.byte_counter import lookup_ids

#: Of each feature, how many rows follow one another with the same ids.
RUNS = {"bag": 4, "items": 4, "actions": 2, "alone": 1}
SEQUENCES = ["items", "actions", "alone"]
ROWS, DIM, BATCH, NUM_STEPS = 40, 8, 12, 4


@dataclass
class Batch(OnCpu):
    sparse: KeyedJaggedTensor
    labels: Tensor


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
        means = self.mean(found["items"]), self.mean(found["alone"])
        return loss_of(self.bags(batch.sparse), newest, *means, batch.labels)


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
        vectors = pooled["items", "actions"], pooled["items"], pooled["alone"]
        return loss_of(self.bags(batch.sparse), *vectors, batch.labels)


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


def train(make: type[nn.Module], deduplicated: bool, stock: bool) -> Trained:
    ready = recd_plugins.wrap(make())
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.02}
    dmp = sharded_side(ready, params, stock)
    pipeline = pipeline_of(dmp, 0.02, stock)
    loader: Any = list(batches(dist.get_rank()))
    source = chain(ready.dedup(loader) if deduplicated else loader, batches(7, 1))
    with lookup_ids(dmp) as counted:
        losses = [float(pipeline.progress(source)) for _ in range(NUM_STEPS + 1)]
    return Trained(losses, tables_here(dmp), counted.total)


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
        train(ByHand, deduplicated=False, stock=True),
        train(Wrapped, deduplicated=False, stock=False),
        train(Wrapped, deduplicated=True, stock=False),
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
