"""A model whose tables are made whole, and on the meta device, sharded in every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded import CPU, bags, everyone, sequences
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from recd_plugins.model.deferred_tables import deferred_tables
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.rank_state import copy_weights, first_weights

ROWS, DIM = 37, 8


class Model(nn.Module):
    """Two modules with tables, and a layer after them."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        sizes: Any = {"rows": ROWS, "dim": DIM, "device": device}
        self.bags = bags("b0", "b1", **sizes)
        self.rows = sequences("e0", "e1", **sizes)
        self.top = nn.Linear(DIM, 1, device=device)

    def forward(self, bags: KeyedJaggedTensor, rows: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(bags)["b0"].mean(0) + self.rows(rows)["e0"].values().mean(0)
        loss: Tensor = self.top(pooled).mean()
        return loss


def sharded(model: nn.Module, sharding: str) -> DistributedModelParallel:
    ready = recd_plugins.wrap(model, batch_size=4)
    dense = sharding == "data_parallel"
    of_bags = sharding in ("table_column_wise", "table_row_wise")  # alone
    constraints = {
        name: ParameterConstraints(
            sharding_types=["row_wise" if of_bags and name[2] == "e" else sharding],
            compute_kernels=["dense" if dense else "fused"],
            min_partition=4,
        )
        for name in ("t_b0", "t_b1", "t_e0", "t_e1")
    }
    sharders = ready.sharders(fused_params={"learning_rate": 0.1})
    planner = ready.planner(constraints=constraints)
    return DistributedModelParallel(
        ready.model,
        env=everyone(),
        device=CPU,
        plan=planner.collective_plan(ready.model, sharders, dist.group.WORLD),
        sharders=sharders,
    )


def parts(dmp: DistributedModelParallel) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, value in dmp.state_dict().items():
        whole = not isinstance(value, ShardedTensor)
        local: Any = [value] if whole else [shard.tensor for shard in value.local_shards()]
        found[name] = [tensor.detach().clone() for tensor in local]
    return found


def differing(rank: int, world_size: int, shardings: list[str]) -> dict[str, list[str]]:
    return {each: _differing(each, rank) for each in shardings}


def _differing(sharding: str, rank: int) -> list[str]:
    variants = []
    for deferred in (False, True):
        torch.manual_seed(5)
        if deferred:
            with deferred_tables():
                model = Model()
        else:
            model = Model()
        first = first_weights(model)
        torch.manual_seed(rank)  # what TorchRec draws is another on every rank
        dmp = sharded(model, sharding)
        state = dmp.state_dict()
        copy_weights(state, first)
        dmp.load_state_dict(state)
        variants.append((parts(dmp), torch.get_rng_state()))
    (whole, after), (made, also_after) = variants
    assert whole.keys() == made.keys()
    assert torch.equal(after, also_after), "later draws are what they were"
    return [
        name
        for name in whole
        if len(whole[name]) != len(made[name]) or not all(map(torch.equal, whole[name], made[name]))
    ]


SHARDINGS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
OF_NODES = ["table_row_wise", "table_column_wise"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_sharding_starts_as_whole_tables_do(world_size: int) -> None:
    shardings = SHARDINGS + (OF_NODES if world_size == 4 else [])
    local = 2 if world_size == 4 else None
    for found in run_on_ranks(differing, world_size, shardings, local_world_size=local):
        assert found == {sharding: [] for sharding in shardings}
