from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.sharded import (
    CPU,
    SGD,
    bags,
    everyone,
    exact_sharders,
    one_rank,
    plan_of,
    sequences,
    shard,
)
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.api import ExactEmbeddingBagCollectionSharder, ExactShardedEmbeddingBagCollection
from recd_plugins.sharding.sharders import left_uncompiled
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks


class Sharded(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + (1 if torch.compiler.is_compiling() else 0)


def test_they_are_left_out_of_what_is_compiled() -> None:
    for sharded, compiled in ((left_uncompiled(Sharded()), False), (Sharded(), True)):
        torch.compiler.reset()
        model = torch.compile(nn.Sequential(sharded), backend="eager")
        assert model(torch.zeros(1)).item() == compiled
    torch.compiler.reset()


def row_wise(module: nn.Module, sharder: Any) -> Any:
    return sharder.shard(module, plan_of(module, "row_wise", sharder, 1, 1), everyone(), CPU)


class SeenBags(EmbeddingBagCollection):
    pass


class ShardedSeenBags(ExactShardedEmbeddingBagCollection):
    def distribute(self, ctx: Any, features: Any) -> Any:
        self.sent = features.values().tolist()
        return super().distribute(ctx, features)

    def look_up(self, ctx: Any, input: Any) -> Any:
        self.looked_up = input[0].values().tolist()
        return super().look_up(ctx, input)


class SeenSharder(ExactEmbeddingBagCollectionSharder):
    @property
    def module_type(self) -> Any:
        return SeenBags

    @property
    def sharded_module_type(self) -> Any:
        return ShardedSeenBags


def test_bags_of_ones_own_see_what_is_sent_and_looked_up() -> None:
    module, sharder = SeenBags(bags("clicks").embedding_bag_configs()), SeenSharder({})
    with one_rank():
        sharded = row_wise(module, sharder)
        ids, lengths = torch.tensor([1, 5, 2]), torch.tensor([2, 1])
        rows = sharded(KeyedJaggedTensor(["clicks"], ids, lengths=lengths))
        assert rows.values().shape == (2, 4)
    assert sharded.sent == sharded.looked_up == [1, 5, 2]


IDS = {"a": [[1, 2], [3]], "b": [[4], [5, 6]]}


def batch(names: str) -> TensorDict:
    lists = {name: [torch.tensor(row) for row in IDS[name]] for name in names}
    nested = partial(torch.nested.nested_tensor, layout=torch.jagged)
    return TensorDict({name: nested(rows) for name, rows in lists.items()})


@pytest.mark.parametrize("kind", [bags, sequences])
def test_their_order_may_change(kind: Any) -> None:
    """TorchRec looks each feature up in the table of another, and says nothing."""
    with one_rank():
        module = kind(*IDS)
        (sharder,) = (s for s in exact_sharders(SGD) if s.module_type is type(module))
        sharded = row_wise(module, sharder)

        def vectors(names: str) -> list[Tensor]:
            found = sharded(batch(names)).wait()
            return [found[name] if kind is bags else found[name].values() for name in IDS]

        first, later = vectors("ab"), vectors("ba")
        assert not torch.equal(*first)
        assert all(map(torch.equal, first, later))


def copies_ids(rank: int, world_size: int, sharding: str, kind: str) -> bool:
    module: Any = {"bags": bags, "sequences": sequences}[kind]("a", "b")
    dmp: Any = shard(module, exact_sharders(SGD), sharding)
    ids, lengths = torch.tensor([1, 2, 11, 0, 1]), torch.tensor([1, 2, 0, 2])
    features = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths).to(DEVICE)
    sharded = dmp.module
    (received,) = sharded.input_dist(sharded.create_context(), features).wait().wait()
    assert received.keys() == ["a", "b"]
    return bool(received.values().data_ptr() != features.values().data_ptr())


CASES = [*product(("table_wise", "row_wise", "column_wise"), ("bags", "sequences"))]


@pytest.mark.parametrize(("sharding", "kind"), [*CASES, ("table_row_wise", "bags")])
def test_ids_stay_in_their_tensor(sharding: str, kind: str) -> None:
    assert run_on_ranks(copies_ids, 1, sharding, kind) == [False]
