"""What the ranks of test_simulate.py do: steps of a sharded collection, their bytes counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tests.sharded import everyone, exact_sharders, plan_of
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
    tier_groups,
)
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sharding.gradient_dedup import all_gradients_sent

STEPS = 3
DIM = 4
# b and c look up one table.
FEATURES = {"t0": ("a",), "t1": ("b", "c"), "t2": ("d",)}
ROWS = {"t0": 203, "t1": 37, "t2": 64}
TIERS = {
    "t0": RowTiers([7, 0, 202], [5, 22, 1, 90, 33, 111, 2]),
    "t1": RowTiers([], [3, 11, 36, 4, 20]),
    "t2": RowTiers([9, 60], []),
}


def lists(rank: int, step: int, feature: str) -> list[NDArray[np.int64]]:
    """The lists of one feature in a batch, fewer on odd ranks; few rows have most accesses."""
    table = next(table for table, features in FEATURES.items() if feature in features)
    random = np.random.default_rng([rank, step, ord(feature)])
    order = np.random.default_rng(7).permutation(ROWS[table])
    lengths = random.integers(0, 6, 12 - 5 * (rank % 2))
    return [order[(random.random(n) ** 3 * ROWS[table]).astype(np.int64)] for n in lengths]


def _kjt(rank: int, step: int, length_dtype: torch.dtype) -> KeyedJaggedTensor:
    features = [name for names in FEATURES.values() for name in names]
    rows = [row for feature in features for row in lists(rank, step, feature)]
    return KeyedJaggedTensor(
        keys=features,
        values=torch.from_numpy(np.concatenate(rows)),
        lengths=torch.tensor([len(row) for row in rows], dtype=length_dtype),
    )


@dataclass(frozen=True)
class Seen:
    """Of one rank and step: bytes by tier and payload, and ids that entered its lookups."""

    sent: Counter[tuple[str, str]]
    ids: int


def steps(
    rank: int, world_size: int, tiered: bool, length_dtype: torch.dtype, coalesced: bool
) -> list[Seen]:
    module: EmbeddingCollection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=table,
                embedding_dim=DIM,
                num_embeddings=ROWS[table],
                feature_names=list(features),
            )
            for table, features in FEATURES.items()
        ]
    )
    training = TrainingSpec(optimizer="sgd", learning_rate=0.1)
    sharders = exact_sharders(training)
    names = {dist.group.WORLD.group_name: "cold"}
    if tiered:
        module = TieredEmbeddingCollection(module, TIERS)
        from recd_plugins.sharding.sharders import fused_params

        tables = tuple(FEATURES) if coalesced else ()
        sharders.append(TieredEmbeddingCollectionSharder(fused_params(training), coalesced=tables))
        names = tier_groups().names
    sharder = next(each for each in sharders if each.module_type is type(module))
    plan = plan_of(module, "row_wise", sharder, world_size, world_size)
    with all_gradients_sent():  # as they are simulated
        dmp = DistributedModelParallel(
            module=module,
            env=everyone(),
            device=torch.device("cpu"),
            plan=ShardingPlan({"": plan}),
            sharders=sharders,
        )
    found = []
    for step in range(STEPS):
        with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
            output = dmp(_kjt(rank, step, length_dtype))
            sum(jagged.values().sum() for jagged in output.values()).backward()
        sent: Counter[tuple[str, str]] = Counter()
        for traffic, num_bytes in counter.sent.items():
            sent[names[traffic.group], traffic.payload] += num_bytes
        found.append(Seen(sent, ids.total))
    return found
