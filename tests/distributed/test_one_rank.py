"""With one rank, ids reach the lookup without a copy."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from tests.sharded import bags, sequences, shard
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    fused_params,
)
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks


def copies_ids(rank: int, world_size: int, sharding: str, kind: str) -> bool:
    parameters = fused_params(TrainingSpec())
    module: Any = {"bags": bags, "sequences": sequences}[kind]("a", "b")
    sharders = [
        ExactEmbeddingBagCollectionSharder(dict(parameters)),
        ExactEmbeddingCollectionSharder(dict(parameters)),
    ]
    dmp: Any = shard(module, sharders, sharding)
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 11, 0, 1]).to(DEVICE),
        lengths=torch.tensor([1, 2, 0, 2]).to(DEVICE),
    )
    sharded = dmp.module
    (received,) = sharded.input_dist(sharded.create_context(), features).wait().wait()
    assert received.keys() == ["a", "b"]
    return bool(received.values().data_ptr() != features.values().data_ptr())


CASES = [*product(("table_wise", "row_wise", "column_wise"), ("bags", "sequences"))]


@pytest.mark.parametrize(("sharding", "kind"), [*CASES, ("table_row_wise", "bags")])
def test_ids_stay_in_their_tensor(sharding: str, kind: str) -> None:
    assert run_on_ranks(copies_ids, 1, sharding, kind) == [False]
