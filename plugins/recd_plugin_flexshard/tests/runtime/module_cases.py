"""What a sharded collection does with tiers and without, on one rank."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.distributed.parity_cases import _whole
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import (
    RowTiers,
    TieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
    tier_groups,
)
from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugins.runtime.errors import RecdError
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sharding.sharders import ExactEmbeddingCollectionSharder
from recd_plugins.training.rank_state import copy_weights

DIM = 4
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
ADAGRAD = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "learning_rate": 0.5,
    "eps": 1e-2,
}
TIERS = {"t": RowTiers([3, 0], [7, 4, 6]), "u": RowTiers([], [1])}
COPIES: tuple[CopyTier, ...] = ("hot", "flex")
# Fewer rows than a rank's block of t has: the last of four ranks has none of u.
ROWS = {"t": 9, "u": 3}
# Hot, flex and cold rows of t, repeated ones too, and rows of u.
IDS = {"f": [[3, 8], [7, 7, 4], []], "g": [[0], [3, 5], [6]], "h": [[1], [0, 1], [2]]}


GENERATORS: dict[str, Any] = {
    "row_wise": row_wise(compute_kernel="fused"),
    "row_wise, dense": row_wise(compute_kernel="dense"),
    "table_wise": table_wise(rank=0, compute_kernel="fused"),
    "data_parallel": data_parallel(),
}


def collection(*, need_indices: bool = False) -> EmbeddingCollection:
    torch.manual_seed(0)
    features = {"t": ["f", "g"], "u": ["h"]}
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=features[name]
            )
            for name, rows in ROWS.items()
        ],
        need_indices=need_indices,
    )


def batch(rank: int = 0, **ids: list[list[int]]) -> KeyedJaggedTensor:
    """Other ids on other ranks, of the same tiers."""
    lists = (IDS | ids).values()
    flat = [row[:: -1 if rank else 1] for rows in lists for row in rows]
    return KeyedJaggedTensor(
        keys=list(IDS),
        values=torch.tensor([id for row in flat for id in row]),
        lengths=torch.tensor([len(row) for row in flat]),
    )


def shard(
    tiers: Mapping[str, RowTiers] | None,
    fused: Mapping[str, Any],
    *,
    module: EmbeddingCollection | None = None,
    generators: Mapping[str, Any] | None = None,
    sparse: Collection[CopyTier] = (),
) -> DistributedModelParallel:
    module = module or collection()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    sharder: Any = ExactEmbeddingCollectionSharder(dict(fused))
    if tiers is not None:
        module = TieredEmbeddingCollection(module, tiers, sparse=sparse)
        sharder = TieredEmbeddingCollectionSharder(dict(fused))
    plan = construct_module_sharding_plan(
        module,
        dict(generators or dict.fromkeys(ROWS, GENERATORS["row_wise"])),
        sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        module=module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    copy_weights(dmp.state_dict(), weights)
    return dmp


def loss(dmp: torch.nn.Module, features: KeyedJaggedTensor, scale: float = 1.0) -> Tensor:
    total = torch.zeros(())
    for number, jagged in enumerate(dmp(features).values()):
        values = jagged.values()
        # Gradients differ from row to row and from scalar to scalar.
        factors = torch.arange(values.numel()).view_as(values).cos() + number
        total = total + (values.sin() * factors).sum()
    return scale * total


def a_step(dmp: DistributedModelParallel, rank: int) -> None:
    loss(dmp, batch(rank)).backward()


def two_forward_passes(dmp: DistributedModelParallel, rank: int) -> None:
    """Of one backward pass, and of two in the other order."""
    (loss(dmp, batch(rank)) + loss(dmp, batch(1 - rank), 0.5)).backward()
    first, second = loss(dmp, batch(rank)), loss(dmp, batch(1 - rank), 0.5)
    second.backward()
    first.backward()


def without_gradient(dmp: DistributedModelParallel, rank: int) -> None:
    a_step(dmp, rank)
    dmp.eval()
    with torch.no_grad():
        loss(dmp, batch(rank))
    dmp.train()
    a_step(dmp, rank)


def backward_passes_elsewhere(dmp: DistributedModelParallel, rank: int) -> None:
    """One that does not get to the module, and a forward pass without a backward pass."""
    a_step(dmp, rank)
    unused = loss(dmp, batch(rank))
    other = torch.ones(2, requires_grad=True)
    (other * unused.detach()).sum().backward()
    del unused
    a_step(dmp, rank)


def twice_through_one_graph(dmp: DistributedModelParallel, rank: int) -> None:
    total = loss(dmp, batch(rank))
    total.backward(retain_graph=True)
    total.backward()


def another_learning_rate(dmp: DistributedModelParallel, rank: int) -> None:
    a_step(dmp, rank)
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = 0.125
    dmp.fused_optimizer.zero_grad()  # which sets it
    a_step(dmp, rank)
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = 0.25
    a_step(dmp, rank)  # not yet
    total = loss(dmp, batch(rank))
    dmp.fused_optimizer.step()
    total.backward()  # by the rate of the forward pass
    a_step(dmp, rank)


def part_of_the_features(dmp: DistributedModelParallel, rank: int) -> None:
    """A loss of one feature, and none of its ids on one rank."""
    features = batch(rank, f=[[], [], []] if rank == 0 else IDS["f"])
    dmp(features)["f"].values().sin().sum().backward()


def a_state_dict_in_between(dmp: DistributedModelParallel, rank: int) -> None:
    """Read between the passes, and filled in place between steps."""
    total = loss(dmp, batch(rank))
    dmp.state_dict()
    total.backward()
    a_step(dmp, rank)
    state = dmp.state_dict()
    copy_weights(state, {name: 2 * _whole(tensor) for name, tensor in state.items()})
    a_step(dmp, rank)


def ids_of_32_bits(dmp: DistributedModelParallel, rank: int) -> None:
    features = batch(rank)
    features = KeyedJaggedTensor(
        keys=features.keys(), values=features.values().int(), lengths=features.lengths().int()
    )
    loss(dmp, features).backward()


def ids_out_of_their_table(dmp: DistributedModelParallel, rank: int) -> None:
    """They read and train the first rows of shards, hot, flex and cold ones.

    One of them would be a flex row of u, if u followed t.
    """
    a_step(dmp, rank)
    features = batch(rank, f=[[3, ROWS["t"] + 1], [ROWS["t"] + 2, 1000], [-1, -2]])
    loss(dmp, features).backward()


PROCEDURES: dict[str, Callable[[DistributedModelParallel, int], None]] = {
    function.__name__: function
    for function in (
        a_step,
        two_forward_passes,
        without_gradient,
        backward_passes_elsewhere,
        twice_through_one_graph,
        another_learning_rate,
        part_of_the_features,
        a_state_dict_in_between,
        ids_of_32_bits,
        ids_out_of_their_table,
    )
}


def weights_after(
    rank: int, world_size: int, procedure: str, fused: Mapping[str, Any]
) -> list[dict[str, Tensor]]:
    """Without tiers, with, and with touched rows alone."""
    trained = []
    for tiers, sparse in ((None, ()), (TIERS, ()), (TIERS, COPIES)):
        dmp = shard(tiers, fused, sparse=sparse)
        PROCEDURES[procedure](dmp, rank)
        trained.append({name: _whole(tensor) for name, tensor in dmp.state_dict().items()})
    return trained


def outputs(
    rank: int, world_size: int, need_indices: bool
) -> list[dict[str, tuple[Tensor, Tensor, Tensor | None]]]:
    """Embeddings, lengths and ids of each feature, without tiers and with."""
    result = []
    for tiers in (None, TIERS):
        dmp = shard(tiers, SGD, module=collection(need_indices=need_indices))
        result.append(
            {
                name: (each.values().detach(), each.lengths(), each.weights_or_none())
                for name, each in dmp(batch(rank)).items()
            }
        )
    return result


def weight_decay_later(rank: int, world_size: int) -> RecdError | None:
    dmp = shard(TIERS, ADAGRAD)
    a_step(dmp, rank)
    dmp.fused_optimizer.update_hyper_parameters({"weight_decay": 0.1})
    return _error(lambda: a_step(dmp, rank))


@dataclass
class Seen:
    """Of one training step.

    Attributes:
        ids: looked up on this rank, by feature.
        bytes: sent by this rank, by tier.
    """

    ids: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


def tracked(rank: int, world_size: int) -> list[RecdError | None]:
    """What trackers of changed rows are refused with: with tiers, and without."""

    def refusal(dmp: Any) -> RecdError | None:
        return _error(lambda: dmp.module.register_post_lookup_tracker_fn(print))

    return [refusal(shard(TIERS, SGD)), refusal(shard(None, SGD))]


def seen(rank: int, world_size: int, with_tiers: bool, sparse: Collection[CopyTier] = ()) -> Seen:
    dmp = shard(TIERS if with_tiers else None, SGD, sparse=sparse)
    result = Seen()
    groups = tier_groups().names
    a_step(dmp, rank)
    dmp.state_dict()
    with torch.no_grad():
        dmp(batch(rank))  # the copies follow the state dict
    with lookup_ids(dmp) as ids, CollectiveBytes() as counter:
        a_step(dmp, rank)
    result.ids = dict(ids.per_feature)
    for traffic, num_bytes in counter.sent.items():
        tier = groups.get(traffic.group, "other")
        result.bytes[tier] = result.bytes.get(tier, 0) + num_bytes
    return result


@dataclass(frozen=True)
class Attempt:
    """A collection that cannot be sharded."""

    tiers: Mapping[str, RowTiers]
    fused: Mapping[str, Any]
    tables: list[EmbeddingConfig]
    sharding: str

    def shard(self) -> None:
        """Raises."""
        shard(
            self.tiers,
            self.fused,
            module=EmbeddingCollection(tables=self.tables),
            generators={table.name: GENERATORS[self.sharding] for table in self.tables},
        )


def refusals(rank: int, world_size: int, attempts: list[Attempt]) -> list[RecdError | None]:
    """What each of several collections is refused with."""
    return [_error(attempt.shard) for attempt in attempts]


def of_a_deduplicated_batch(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """What comes out of a VBE batch, and of the same rows plain."""
    module = shard(TIERS, SGD).module
    names = ["f", "g", "h"]
    deduplicated = KeyedJaggedTensor(
        keys=names,
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1, 0]),
        stride_per_key_per_rank=[[1], [1], [2]],
        inverse_indices=(names, torch.tensor([[0, 0], [0, 0], [0, 1]])),
    )
    plain = KeyedJaggedTensor(
        keys=names, values=torch.tensor([1, 1, 2, 2, 3]), lengths=torch.tensor([1, 1, 1, 1, 1, 0])
    )
    return [
        {name: rows.values().detach() for name, rows in module(batch).items()}
        for batch in (deduplicated, plain)
    ]


def refused_calls(rank: int, world_size: int) -> list[RecdError | None]:
    """Of half a lookup, and of tables that are DTensors in a state dict."""
    module = shard(TIERS, SGD).module
    env = ShardingEnv(world_size, rank, dist.group.WORLD, output_dtensor=True)
    tiered = TieredEmbeddingCollection(collection(), TIERS)
    return [
        _error(lambda: module.output_dist(module.create_context(), [])),
        _error(
            lambda: TieredEmbeddingCollectionSharder(dict(SGD)).shard(
                tiered, module.module_sharding_plan, env
            )
        ),
    ]


def _error(call: Callable[[], object]) -> RecdError | None:
    try:
        call()
    except RecdError as error:
        return error
    return None


def groups_of_uneven_nodes(rank: int, world_size: int) -> None:
    from recd_plugin_flexshard.runtime import groups

    os.environ["LOCAL_WORLD_SIZE"] = str(rank + 1)
    groups._made.clear()
    groups.tier_groups()


def groups_of_another_process_group(rank: int, world_size: int, store: Path) -> tuple[bool, bool]:
    """Whether groups end with the process group they were made in, and others work after it."""
    first = weakref.ref(tier_groups().flex)
    dist.destroy_process_group()
    gc.collect()
    ended = first() is None
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total, group=tier_groups().hot)
    return ended, float(total) == world_size
