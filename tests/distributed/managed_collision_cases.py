"""Collision maps that evict, of deduplicated batches and of the same rows as plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.drop_in.forced_dedup import forced_dedup
from tests.planning.test_planner import prepared, profile, registry
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.drop_in.dedup import Dedup
from recd_plugins.planning.planner import build_planner
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.rank_state import copy_weights

POLICIES = {
    "a": LRU_EvictionPolicy(),
    "b": LFU_EvictionPolicy(),
    "c": DistanceLFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter),
}
ROWS, DIM, NUM_RAW_IDS, SESSION, NUM_STEPS = 64, 8, 400, 4, 8


def bags(hashed: bool = False) -> ManagedCollisionEmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=[name],
            pooling=PoolingType.MEAN if name == "a" else PoolingType.SUM,
        )
        for name in POLICIES
    ]
    maps: dict[str, Any] = {
        f"t_{name}": HashZchManagedCollisionModule(
            zch_size=ROWS, device=DEVICE, total_num_buckets=2, input_hash_size=NUM_RAW_IDS
        )
        if hashed
        else MCHManagedCollisionModule(
            zch_size=ROWS,
            device=DEVICE,
            eviction_policy=policy,
            eviction_interval=2,
            input_hash_size=NUM_RAW_IDS,
        )
        for name, policy in POLICIES.items()
    }
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=configs), ManagedCollisionCollection(maps, configs)
    )


class Model(nn.Module):
    def __init__(self, hashed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.sparse = bags(hashed)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.sparse(features)[0]
        return torch.cat([found[name] for name in POLICIES], dim=1)


def batch(rank: int, step: int, uneven: bool) -> KeyedJaggedTensor:
    """Rows of sessions, in turn; of other numbers at each step, and on each rank if ``uneven``,
    one of which has none once.

    The first batch is small: MCH's history, as long as it says, is then too short for the others.
    Features stand in another order than tables.
    """
    random = torch.Generator().manual_seed(100 * rank + step)
    sessions = 6 + 4 * (step % 3) + (rank if uneven else 0)
    if uneven and rank and step == 5:
        sessions = 0
    lists = [torch.zeros(0, dtype=torch.long)]
    for _ in POLICIES:
        rows = [
            torch.randint(NUM_RAW_IDS, (int(length),), generator=random)
            for length in torch.randint(0, 12, (sessions,), generator=random)
        ]
        lists += rows * SESSION
    return KeyedJaggedTensor(
        sorted(POLICIES, reverse=True),
        torch.cat(lists),
        lengths=torch.tensor([len(ids) for ids in lists[1:]], dtype=torch.long),
        stride=SESSION * sessions,
    )


@dataclass(frozen=True)
class Trained:
    """One rank's.

    Attributes:
        losses: of the steps, then of an evaluation.
        state: shards of tables and maps at the end.
        sent: bytes of integers that all training steps sent.
    """

    losses: list[float]
    state: dict[str, Tensor]
    sent: int


@forced_dedup()
def train(rank: int, optimizer: str, deduplicated: bool, stock: bool) -> Trained:
    """A few steps and an evaluation; all have the same plan, which is ours."""
    reg = registry(optimizer=optimizer)
    model = Model()
    ready = prepared(reg, model)
    ours = build_sharders(ready)
    planner = build_planner(
        ready, world_size=dist.get_world_size(), profile=profile(), device=DEVICE
    )
    params = fused_params(reg.training)
    theirs: Any = [
        EmbeddingBagCollectionSharder(dict(params)),
        ManagedCollisionEmbeddingBagCollectionSharder(fused_params=dict(params)),
    ]
    dedup = Dedup(model)
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=DEVICE,
        plan=planner.plan(model, ours),
        # Also as a trainer gives them.
        sharders=theirs if stock else build_sharders(ready, theirs),
    )
    torch.manual_seed(rank)  # rows are drawn anew
    losses, counter = [], CollectiveBytes()
    for step in range(NUM_STEPS + 1):
        if step == NUM_STEPS:
            dmp.eval()
        # TorchRec's own row-wise tables take no batches of different sizes on gloo.
        features = batch(rank, step, uneven=optimizer != "sgd")
        with counter:
            found = dmp((dedup.batch(features) if deduplicated else features).to(DEVICE))
            loss = (found - 1).square().sum() / 1000
            loss.backward()
        losses.append(loss.item())
    state = {
        name: value.local_shards()[0].tensor.clone().cpu()
        for name, value in dmp.state_dict().items()
        if isinstance(value, ShardedTensor)
    }
    return Trained(losses, state, counter.by("payload")["integers"])


def three_ways(rank: int, world_size: int, optimizer: str) -> dict[str, Trained]:
    """TorchRec's own of plain batches, and these sharders of both forms.

    On CPU TorchRec evicts no rows that row-wise Adagrad updates.
    """
    ways = {
        "plain": train(rank, optimizer, deduplicated=False, stock=False),
        "deduplicated": train(rank, optimizer, deduplicated=True, stock=False),
    }
    if optimizer == "sgd":
        ways["stock"] = train(rank, optimizer, deduplicated=False, stock=True)
    return ways


@forced_dedup()
def errors_of_a_long_sum(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """How far off a step of SGD is on plain batches and deduplicated, next to 64 bits, by table.

    Before its first eviction a map has no id: all of a rank's share its last row, which gets
    hundreds of gradients in one step. Lists have 7 ids; rows of tables are numbers up to 1.
    """
    sessions, length = 16, 7
    names = sorted(POLICIES, reverse=True)

    def drawn(of: int) -> Tensor:
        random = torch.Generator().manual_seed(of)
        shape = len(names), sessions, length
        return torch.randint(NUM_RAW_IDS, shape, generator=random).repeat(1, SESSION, 1)

    ids = [drawn(of) for of in range(world_size)]
    lengths = torch.full((len(names) * sessions * SESSION,), length)
    features = KeyedJaggedTensor(names, ids[rank].flatten(), lengths=lengths)
    found, first = [], dict[str, Tensor]()
    for deduplicated in (False, True):
        reg = registry()
        model = Model()
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -1, 1)
        first = {name: value.detach().clone() for name, value in model.named_parameters()}
        ready, dedup = prepared(reg, model), Dedup(model)
        planner = build_planner(ready, world_size=world_size, profile=profile(), device=DEVICE)
        sharders = build_sharders(ready)
        dmp = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=DEVICE,
            plan=planner.plan(model, sharders),
            sharders=sharders,
        )
        copy_weights({name: dmp.state_dict()[name] for name in first}, first)
        vectors = dmp((dedup.batch(features) if deduplicated else features).to(DEVICE))
        ((vectors - 1).square().sum() / len(vectors)).backward()
        state = dmp.state_dict()
        found.append(
            {name: state[name].local_shards()[0].tensor[-1].double().cpu() for name in first}
        )
    errors = {}
    for name, weights in first.items():
        table = name.split(".")[-2]
        last = weights.view(world_size, -1, DIM)[:, -1].double()
        gradient = torch.zeros(DIM, dtype=torch.float64)
        for of_rank in ids:
            of_row = of_rank[names.index(table.removeprefix("t_"))] * world_size // NUM_RAW_IDS
            shares = torch.stack([(of_row == row).sum(1) for row in range(world_size)], 1).double()
            if table == "t_a":
                shares /= length
            ahead = 2 * (shares @ last - 1) / len(shares)
            gradient += shares[:, rank] @ ahead / world_size
        right = last[rank] - reg.training.learning_rate * gradient
        plain, unique = ((each[name] - right).abs().max().item() for each in found)
        errors[table] = plain, unique
    return errors
