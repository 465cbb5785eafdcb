"""A request model in a trainer of its own, and the same model that computes all layers per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in.trainer import OnCpu, forced_dedup, pipeline_of, sharded_side, tables_here
from tests.sharded import CPU, bags, exact_sharders, shard
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import recd_plugins
from recd_plugins.api import CandidateBatch, UserBatch, UserSide
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.sparse.request_rows import RequestRows

FEATURES = ["user", "clicks", "item"]
ROWS, DIM, CANDIDATES, REQUESTS, NUM_STEPS, FEW_STEPS = 40, 8, 4, 8, 20, 8
SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "coalesced")


@dataclass
class Requests(OnCpu):
    sparse: KeyedJaggedTensor
    dense: Tensor  # [B, 3]; the first two columns describe the user
    labels: Tensor


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
    """The first and last request are cut: half of their rows are in other batches."""
    random = torch.Generator().manual_seed(rank)
    num_rows = CANDIDATES * REQUESTS
    request = (torch.arange(num_rows) + CANDIDATES // 2) // CANDIDATES
    for _ in range(num_batches):
        user = torch.randint(ROWS, (REQUESTS + 1,), generator=random)[request]
        lengths = torch.randint(0, 4, (REQUESTS + 1,), generator=random).tolist()
        clicks = [torch.randint(ROWS, (n,), generator=random) for n in lengths]
        every = [clicks[n] for n in request.tolist()]
        item = torch.randint(ROWS, (num_rows,), generator=random)
        ones = torch.ones(num_rows, dtype=torch.int64)
        counts = torch.tensor([len(each) for each in every])
        kjt = KeyedJaggedTensor(
            FEATURES, torch.cat([user, *every, item]), lengths=torch.cat([ones, counts, ones])
        )
        of_user = torch.rand(REQUESTS + 1, 2, generator=random)[request]
        dense = torch.cat([of_user, torch.rand(num_rows, 1, generator=random)], dim=1)
        yield Requests(kjt, dense, torch.randint(2, (num_rows,), generator=random).float())


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    tables: dict[str, Tensor]
    dense: dict[str, Tensor]


def train(make: type[Ranker], world_size: int, sharding: str, *, stock: bool) -> Trained:
    """Train with an entry of ``tests.sharded.PLACES``, or with the plan of TorchRec's planner."""
    model, params = make(), {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05}
    ready = recd_plugins.wrap(model)
    if sharding == "planner":
        dmp = sharded_side(ready, params, stock)
    elif sharding == "coalesced":
        training = TrainingSpec(optimizer="sgd", learning_rate=0.05)
        sharders = exact_sharders(training, [f"t_{name}" for name in FEATURES])
        dmp = shard(model, sharders, "row_wise", CPU)
    else:
        dmp = shard(model, ready.sharders(fused_params=params), sharding, CPU)
    pipeline = pipeline_of(dmp, 0.05, stock)
    num_steps = FEW_STEPS if world_size == 4 else NUM_STEPS
    loader: Any = list(batches(dist.get_rank(), num_steps))
    source = iter(loader if stock else ready.dedup(loader, features=["user", "clicks"]))
    losses = [float(pipeline.progress(source)[0]) for _ in range(num_steps)]
    state = {n: tensor for n, tensor in dmp.state_dict().items() if "bags" not in n}
    return Trained(losses, tables_here(dmp), state)


@forced_dedup()
def both_ways(rank: int, world_size: int) -> tuple[Trained, Trained, dict[str, list[float]]]:
    """Train per row with stock TorchRec, and once per request with deduplicated batches.

    The last result has the losses of each other sharding, once per request, on four ranks.
    """
    others = SHARDINGS if world_size == 4 else ()
    return (
        train(PerRow, world_size, "planner", stock=True),
        train(Ranker, world_size, "planner", stock=False),
        {each: train(Ranker, world_size, each, stock=False).losses for each in others},
    )
