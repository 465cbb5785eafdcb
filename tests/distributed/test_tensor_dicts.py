"""Features that come as a TensorDict, which TorchRec's modules take, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)

IDS = {"a": [[1, 2], [3]], "b": [[4], [5, 6]]}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def batch(names: str) -> TensorDict:
    lists = {name: [torch.tensor(row) for row in IDS[name]] for name in names}
    return TensorDict(
        {
            name: torch.nested.nested_tensor(rows, layout=torch.jagged)
            for name, rows in lists.items()
        }
    )


def tables(config: Any) -> list[Any]:
    return [
        config(name=f"t_{name}", embedding_dim=4, num_embeddings=9, feature_names=[name])
        for name in IDS
    ]


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_their_order_may_change(one_rank: None, pooled: bool) -> None:
    """TorchRec looks each feature up in the table of another, and says nothing."""
    module: nn.Module = (
        EmbeddingBagCollection(tables(EmbeddingBagConfig))
        if pooled
        else EmbeddingCollection(tables(EmbeddingConfig))
    )
    sharder: Any = (
        ExactEmbeddingBagCollectionSharder({}) if pooled else ExactEmbeddingCollectionSharder({})
    )
    places = {f"t_{name}": row_wise(compute_kernel="fused") for name in IDS}
    plan = construct_module_sharding_plan(
        module, places, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(module, plan, env, torch.device("cpu"))

    def vectors(names: str) -> list[Tensor]:
        found = sharded(batch(names)).wait()
        return [found[name] if pooled else found[name].values() for name in IDS]

    first, later = vectors("ab"), vectors("ba")
    assert not torch.equal(*first)
    assert all(map(torch.equal, first, later))
