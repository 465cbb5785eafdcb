"""A request model in a trainer of its own, and the same model that computes all layers per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in.trainer import forced_dedup
from tests.sharded import CPU, bags, local_weights, sharded
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

import recd_plugins
from recd_plugins.api import CandidateBatch, UserBatch, UserSide
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sparse.request_rows import RequestRows

FEATURES = ["user", "clicks", "item"]
ROWS, DIM, CANDIDATES, REQUESTS, NUM_STEPS = 40, 8, 4, 8, 50


@dataclass
class Requests(Pipelineable):
    sparse: KeyedJaggedTensor
    dense: Tensor  # [B, 3]; the first two columns describe the user
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Requests:
        return Requests(self.sparse.to(device), self.dense.to(device), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        raise AssertionError("no streams on CPU")

    def pin_memory(self) -> Requests:
        return self


class Ranker(recd_plugins.RequestModel):
    """Reads the user's bags and dense columns once per request, with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = bags(*FEATURES, rows=ROWS, dim=DIM, means=["clicks"])
        self.encoder = nn.Sequential(nn.Linear(2 * DIM + 2, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(8 + DIM + 1, 8), nn.Tanh(), nn.Linear(8, 1))

    def request_rows(self, batch: Requests) -> RequestRows | None:
        return recd_plugins.request_rows(batch.sparse, ["user", "clicks"], batch.dense[:, :2])

    def look_up(self, batch: Requests) -> KeyedTensor:
        return self.bags(batch.sparse)

    def user(self, batch: UserBatch) -> dict[str, Tensor]:
        vectors = [batch.vectors["user"], batch.vectors["clicks"]]
        dense = batch.select(batch.dense[:, :2])
        return {"code": self.encoder(torch.cat([*vectors, dense], dim=1))}

    def candidate(self, batch: CandidateBatch, user: UserSide) -> Tensor:
        rows = [user.expanded["code"], batch.vectors["item"], batch.dense[:, 2:]]
        scores: Tensor = self.head(torch.cat(rows, dim=1))
        return scores.squeeze(1)


class PerRow(Ranker):
    def request_rows(self, batch: Requests) -> None:
        return None


def batches(rank: int, num_batches: int = NUM_STEPS) -> Iterator[Requests]:
    random = torch.Generator().manual_seed(rank)
    num_rows = CANDIDATES * REQUESTS
    for _ in range(num_batches):
        user = torch.randint(ROWS, (REQUESTS,), generator=random).repeat_interleave(CANDIDATES)
        lengths = torch.randint(0, 4, (REQUESTS,), generator=random).tolist()
        clicks = [torch.randint(ROWS, (n,), generator=random) for n in lengths]
        every = [each for each in clicks for _ in range(CANDIDATES)]
        item = torch.randint(ROWS, (num_rows,), generator=random)
        ones = torch.ones(num_rows, dtype=torch.int64)
        counts = torch.tensor([len(each) for each in every])
        kjt = KeyedJaggedTensor(
            FEATURES, torch.cat([user, *every, item]), lengths=torch.cat([ones, counts, ones])
        )
        of_user = torch.rand(REQUESTS, 2, generator=random).repeat_interleave(CANDIDATES, 0)
        dense = torch.cat([of_user, torch.rand(num_rows, 1, generator=random)], dim=1)
        yield Requests(kjt, dense, torch.randint(2, (num_rows,), generator=random).float())


@dataclass(frozen=True)
class Trained:
    """One rank's losses, weights of the tables, and state of the dense layers."""

    losses: list[float]
    tables: dict[str, Tensor]
    dense: dict[str, Tensor]


def train(make: type[Ranker], world_size: int, *, stock: bool) -> Trained:
    model, params = make(), {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05}
    ready = recd_plugins.wrap(model)
    ours: Any = ready.sharders(fused_params=params)
    theirs: Any = [EmbeddingBagCollectionSharder(dict(params))]
    plan = ready.planner(world_size=world_size).plan(model, ours)
    dmp = sharded(model, plan, theirs if stock else ours, CPU)
    dense = [p for p in dmp.parameters() if not hasattr(p, "_in_backward_optimizers")]
    make_pipeline: Any = TrainPipelineSparseDist if stock else build_train_pipeline
    pipeline = make_pipeline(dmp, torch.optim.SGD(dense, lr=0.05), CPU)
    loader: Any = list(batches(dist.get_rank()))
    source = chain(loader if stock else ready.dedup(loader, features=["user", "clicks"]))
    losses = []
    for _ in range(NUM_STEPS):
        loss, _, _ = pipeline.progress(source)
        losses.append(float(loss))
    tables = {".".join(n.split(".")[-2:]): tensor for n, tensor in local_weights(dmp).items()}
    state = {n: tensor for n, tensor in dmp.state_dict().items() if "bags" not in n}
    return Trained(losses, tables, state)


@forced_dedup()
def both_ways(rank: int, world_size: int) -> tuple[Trained, Trained]:
    """Train per row with stock TorchRec, and once per request with deduplicated batches."""
    return train(PerRow, world_size, stock=True), train(Ranker, world_size, stock=False)
