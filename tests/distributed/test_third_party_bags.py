"""Bags of a plugin see the ids that they send and look up."""

from __future__ import annotations

from typing import Any

import torch
from tests.sharded import CPU, bags, everyone, one_rank, plan_of
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.api import ExactEmbeddingBagCollectionSharder, ExactShardedEmbeddingBagCollection


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
        plan = plan_of(module, "row_wise", sharder, 1, 1)
        sharded = sharder.shard(module, plan, everyone(), CPU)
        ids, lengths = torch.tensor([1, 5, 2]), torch.tensor([2, 1])
        rows = sharded(KeyedJaggedTensor(["clicks"], ids, lengths=lengths))
        assert rows.values().shape == (2, 4)
    assert sharded.sent == sharded.looked_up == [1, 5, 2]
