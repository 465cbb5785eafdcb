from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from tests.drop_in.trainer import forced_dedup
from tests.planning.test_planner import prepared, profile, registry
from tests.sharded import bags, sharded
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardedTensor
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

from recd_plugins.compat.managed_collision import reset_rows
from recd_plugins.drop_in.dedup import Dedup
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

POLICIES = {
    "a": LRU_EvictionPolicy(),
    "b": LFU_EvictionPolicy(),
    "c": DistanceLFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter),
}
NAMES = sorted(POLICIES, reverse=True)  # in another order than tables
ROWS, DIM, NUM_RAW_IDS, SESSION, NUM_STEPS = 64, 8, 400, 4, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        inside = bags(*POLICIES, rows=ROWS, dim=DIM, means="a")
        sizes: Any = {"zch_size": ROWS, "input_hash_size": NUM_RAW_IDS, "eviction_interval": 2}
        maps: Any = {
            f"t_{name}": MCHManagedCollisionModule(device=DEVICE, eviction_policy=policy, **sizes)
            for name, policy in POLICIES.items()
        }
        collection = ManagedCollisionCollection(maps, inside.embedding_bag_configs())
        self.sparse = ManagedCollisionEmbeddingBagCollection(inside, collection)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.sparse(features)[0]
        return torch.cat([found[name] for name in POLICIES], dim=1)


def batch(rank: int, step: int, uneven: bool) -> KeyedJaggedTensor:
    """Rows of sessions, in turn; of other numbers at each step, and on each rank if ``uneven``,
    one of which has none once.

    The first batch is small: MCH's history, as long as it says, is then too short for the others.
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
    lengths = torch.tensor([len(ids) for ids in lists[1:]], dtype=torch.long)
    return KeyedJaggedTensor(NAMES, torch.cat(lists), lengths=lengths, stride=SESSION * sessions)


@dataclass(frozen=True)
class Trained:
    losses: list[float]  # of the steps, then of an evaluation
    state: dict[str, Tensor]  # shards of tables and maps at the end
    sent: int  # bytes of integers


def sharded_model(model: Model, optimizer: str, stock: bool) -> tuple[Any, Dedup]:
    reg = registry(optimizer=optimizer)
    ready, dedup = prepared(reg, model), Dedup(model)
    planner = ready.planner(world_size=dist.get_world_size(), profile=profile(), device=DEVICE)
    params = fused_params(reg.training)
    theirs: Any = [
        EmbeddingBagCollectionSharder(dict(params)),
        ManagedCollisionEmbeddingBagCollectionSharder(fused_params=dict(params)),
    ]
    plan = planner.plan(model, build_sharders(ready))
    # Also as a trainer gives them.
    return sharded(model, plan, theirs if stock else build_sharders(ready, theirs)), dedup


@forced_dedup()
def train(rank: int, optimizer: str, deduplicated: bool = False, stock: bool = False) -> Trained:
    dmp, dedup = sharded_model(Model(), optimizer, stock)
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
    ways = {"plain": train(rank, optimizer), "deduplicated": train(rank, optimizer, True)}
    if optimizer == "sgd":
        ways["stock"] = train(rank, optimizer, stock=True)
    return ways


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_maps_and_weights_are_those_of_plain_batches(optimizer: str) -> None:
    for ways in run_on_ranks(three_ways, 2, optimizer):
        plain, deduplicated = ways["plain"], ways["deduplicated"]
        for other in (way for name, way in ways.items() if name != "plain"):
            assert other.losses == pytest.approx(plain.losses, abs=1e-6)
            assert other.state.keys() == plain.state.keys()
            for name, value in plain.state.items():
                atol = 1e-6 if value.is_floating_point() else 0
                torch.testing.assert_close(other.state[name], value, atol=atol, rtol=0)
        assert deduplicated.sent < plain.sent / 2
        # Maps that were full evicted.
        ids = next(t for name, t in plain.state.items() if name.endswith("t_b._mch_sorted_raw_ids"))
        assert (ids < NUM_RAW_IDS).sum() == len(ids) - 1


def test_rows_are_reset_as_fbgemms_operator_for_cuda_does() -> None:
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 2,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )
    weights, states = kernel.split_embedding_weights(), kernel.split_optimizer_states()
    for each in (*weights, *(momentum for momentum, *_ in states)):
        each.fill_(1.0)
    one = torch.tensor([1])
    reset_rows(kernel, torch.tensor([0, 2]), torch.tensor([0, 2]), one, torch.tensor([0]))
    assert [w.sum(dim=1).tolist() for w in weights] == [[8.0] * 4, [0.0, 8.0, 0.0, 8.0]]
    assert [m.tolist() for m, *_ in states] == [[1.0] * 4, [0.0, 1.0, 0.0, 1.0]]
