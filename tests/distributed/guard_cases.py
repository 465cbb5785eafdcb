"""Combinations that go wrong, on one rank, with TorchRec's sharders or the exact ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from tests.distributed.bare_prepared import bare_prepared, bare_registry
from torch import nn
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.guards import check_every_parameter_is_trained
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.training.rank_state import copy_weights

CPU = torch.device("cpu")
ROWS = 12
DIM = 4
TRAINING = TrainingSpec(optimizer="sgd", learning_rate=1.0)


def bags(is_weighted: bool = False, **pooling: PoolingType) -> EmbeddingBagCollection:
    """A table and a feature of the same name for each argument."""
    return EmbeddingBagCollection(
        is_weighted=is_weighted,
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=ROWS,
                feature_names=[name],
                pooling=kind,
            )
            for name, kind in pooling.items()
        ],
    )


def sequences(*names: str) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
            for name in names
        ]
    )


def shard(
    module: nn.Module,
    generators: dict[str, ParameterShardingGenerator],
    *,
    stock: bool,
    coalesced: Iterable[str] = (),
) -> DistributedModelParallel:
    sharders = (
        stock_sharders(TRAINING)
        if stock
        else build_sharders(bare_prepared(bare_registry(TRAINING), coalesced))
    )
    sharder = next(each for each in sharders if each.module_type is type(module))
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module, generators, sharder, local_size=size, world_size=size, device_type="cpu"
    )
    dmp = DistributedModelParallel(
        module=module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"": plan}),
        sharders=sharders,
    )
    torch.manual_seed(0)
    state = dmp.state_dict()
    copy_weights(state, {name: torch.randn(ROWS, DIM) for name in sorted(state)})
    return dmp


def vbe(*names: str) -> KeyedJaggedTensor:
    """Two unique rows ([0, 1] and [2]) of each feature, for three rows."""
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.tensor([0, 1, 2] * len(names)),
        lengths=torch.tensor([2, 1] * len(names)),
        stride_per_key_per_rank=[[2]] * len(names),
        inverse_indices=(list(names), torch.tensor([[0, 1, 0]] * len(names))),
    )


def plain(*names: str) -> KeyedJaggedTensor:
    """The same rows, all three."""
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.tensor([0, 1, 2, 0, 1] * len(names)),
        lengths=torch.tensor([2, 1, 2] * len(names)),
    )


def deduplicated_sequences(rank: int, world_size: int, stock: bool) -> float:
    """How far a table moves that is fed VBE."""
    dmp = shard(sequences("a"), {"a": table_wise(rank=0, compute_kernel="fused")}, stock=stock)
    return _step(dmp, vbe("a"))


def sequences_under_sync_collectives(rank: int, world_size: int, stock: bool) -> float:
    dmp = shard(sequences("a"), {"a": table_wise(rank=0, compute_kernel="fused")}, stock=stock)
    comm_ops.set_use_sync_collectives(True)
    try:
        return _step(dmp, plain("a"))
    finally:
        comm_ops.set_use_sync_collectives(False)


def plain_sequences(rank: int, world_size: int, stock: bool) -> float:
    dmp = shard(sequences("a"), {"a": table_wise(rank=0, compute_kernel="fused")}, stock=stock)
    return _step(dmp, plain("a"))


def replicated_sequences(rank: int, world_size: int, stock: bool) -> list[int]:
    """Shape of what a data-parallel EmbeddingCollection gives for five ids."""
    dmp = shard(sequences("a"), {"a": data_parallel()}, stock=stock)
    return list(dmp(plain("a"))["a"].values().shape)


def deduplicated_replicated_bags(
    rank: int, world_size: int, stock: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out of rows that are stored once, and of all of them."""
    dmp = shard(bags(a=PoolingType.SUM), {"a": data_parallel()}, stock=stock)
    return dmp(vbe("a")).values().detach(), dmp(plain("a")).values().detach()


def variable_bags_of_no_rows_known(rank: int, world_size: int, stock: bool) -> None:
    dmp = shard(bags(a=PoolingType.SUM), {"a": table_wise(0, compute_kernel="dense")}, stock=stock)
    features = KeyedJaggedTensor(
        ["a"],
        torch.tensor([0, 1, 2]),
        lengths=torch.tensor([2, 1]),
        stride_per_key_per_rank=[[2]],
    )
    dmp(features).values()


def deduplicated_row_wise_bags(rank: int, world_size: int, stock: bool) -> float:
    dmp = shard(bags(a=PoolingType.SUM), {"a": row_wise(compute_kernel="fused")}, stock=stock)
    features = vbe("a") if rank else plain_as_vbe("a")
    return _step(dmp, features)


def plain_as_vbe(*names: str) -> KeyedJaggedTensor:
    """Three unique rows: another number than the other rank has."""
    features = plain(*names)
    return KeyedJaggedTensor(
        keys=list(names),
        values=features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=[[3]] * len(names),
        inverse_indices=(list(names), torch.tensor([[0, 1, 2]] * len(names))),
    )


def bags_with_inverse_indices_only(rank: int, world_size: int, stock: bool) -> None:
    dmp = shard(bags(a=PoolingType.SUM), {"a": table_wise(rank=0)}, stock=stock)
    features = plain("a")
    dmp(
        KeyedJaggedTensor(
            keys=["a"],
            values=features.values(),
            lengths=features.lengths(),
            inverse_indices=(["a"], torch.tensor([[0, 1, 0]])),
        )
    )


def sum_next_to_row_wise_mean(rank: int, world_size: int, stock: bool) -> float:
    """How far a sum-pooled table-wise feature is from its sum, next to a row-wise mean table."""
    generators = {
        "a": table_wise(rank=0, compute_kernel="fused"),
        "b": row_wise(compute_kernel="fused"),
    }
    dmp = shard(bags(a=PoolingType.SUM, b=PoolingType.MEAN), generators, stock=stock)
    torch.manual_seed(0)
    table = torch.randn(ROWS, DIM)  # the first that shard() draws
    output = dmp(plain("a", "b"))["a"]
    return float((output[0] - (table[0] + table[1])).abs().max())


def weighted_mean_table_wise(rank: int, world_size: int, stock: bool) -> tuple[float, float]:
    """What a bag's output and its first row's gradient, of ones, are divided by."""
    dmp = _weighted_bags(PoolingType.MEAN, table_wise(rank=0, compute_kernel="fused"), stock)
    before = _local_weights(dmp)
    output = dmp(weighted())["a"]
    output.sum().backward()
    if rank != 0:
        return 0.0, 0.0
    (table,), (after,) = before, _local_weights(dmp)
    divisors = (0.5 * table[0] + 2 * table[1]) / output[0].detach(), 0.5 / (table[0] - after[0])
    means = [float(divisor.mean()) for divisor in divisors]
    return means[0], means[1]


def weighted_mean_row_wise(rank: int, world_size: int, stock: bool) -> float:
    """What a bag's output is divided by."""
    torch.manual_seed(0)
    table = torch.randn(ROWS, DIM)  # the first that shard() draws
    dmp = _weighted_bags(PoolingType.MEAN, row_wise(compute_kernel="fused"), stock)
    return float(((0.5 * table[0] + 2 * table[1]) / dmp(weighted())["a"][0].detach()).mean())


def mean_of_a_weighted_batch(
    rank: int, world_size: int, kind: ShardingType, coalesced: Sequence[str], fused: bool = False
) -> None:
    """Into a module that is not is_weighted, which stock ones multiply by these weights."""
    generator = (
        row_wise(compute_kernel="fused")
        if kind == ShardingType.ROW_WISE
        else table_wise(rank=0, compute_kernel="fused")
    )
    module: EmbeddingBagCollection | FusedEmbeddingBagCollection = bags(a=PoolingType.MEAN)
    if fused:
        module = FusedEmbeddingBagCollection(
            module.embedding_bag_configs(), torch.optim.SGD, {"lr": 1.0}
        )
    dmp = shard(module, {"a": generator}, stock=False, coalesced=coalesced)
    features = weighted()
    plain = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())
    dmp(plain)["a"].sum().backward()
    dmp(features)


def weights_that_learn(rank: int, world_size: int, stock: bool) -> float | None:
    """Their gradient."""
    dmp = _weighted_bags(PoolingType.SUM, table_wise(rank=0, compute_kernel="fused"), stock)
    weights = torch.tensor([0.5, 2.0], requires_grad=True)
    dmp(weighted(weights))["a"].sum().backward()
    return None if weights.grad is None else float(weights.grad.abs().max())


def weighted(weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    """A bag of rows 0 and 1, and an empty one."""
    return KeyedJaggedTensor(
        keys=["a"],
        values=torch.tensor([0, 1]),
        lengths=torch.tensor([2, 0]),
        weights=torch.tensor([0.5, 2.0]) if weights is None else weights,
    )


def _weighted_bags(
    pooling: PoolingType, generator: ParameterShardingGenerator, stock: bool
) -> DistributedModelParallel:
    return shard(bags(is_weighted=True, a=pooling), {"a": generator}, stock=stock)


def mean_and_sum_of_one_feature(rank: int, world_size: int, stock: bool) -> None:
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=ROWS,
                feature_names=["f"],
                pooling=kind,
            )
            for name, kind in (("a", PoolingType.SUM), ("b", PoolingType.MEAN))
        ]
    )
    row_wise_all = {name: row_wise(compute_kernel="fused") for name in "ab"}
    shard(module, row_wise_all, stock=stock)


def untrained_table(rank: int, world_size: int, stock: bool) -> None:
    """table_row_wise() with its default kernel, and an optimizer of nothing in particular."""
    dmp = shard(bags(a=PoolingType.SUM), {"a": table_row_wise(host_index=0)}, stock=stock)
    check_every_parameter_is_trained(dmp, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))


def _step(dmp: DistributedModelParallel, features: KeyedJaggedTensor) -> float:
    """The largest change of this rank's weights in one step of a loss that depends on all rows."""
    before = _local_weights(dmp)
    output = dmp(features)
    # Of bags a KeyedTensor, of sequences a dictionary of JaggedTensors.
    values = (
        output["a"] if isinstance(dmp.module, ShardedEmbeddingCollection) else output
    ).values()
    values.square().sum().backward()
    pairs = zip(_local_weights(dmp), before, strict=True)
    moved = torch.tensor(max((float((new - old).abs().max()) for new, old in pairs), default=0.0))
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    return float(moved)


def _local_weights(dmp: DistributedModelParallel) -> list[torch.Tensor]:
    return [
        local.tensor.detach().clone()
        for tensor in dmp.state_dict().values()
        for local in tensor.local_shards()
    ]


def no_rows(
    rank: int, world_size: int, kind: str, deduplicated: bool, coalesced: bool
) -> tuple[list[int], list[int], float]:
    """Shapes of the outputs of a batch without rows on rank 1, then on all; what is learnt."""
    module = bags(a=PoolingType.MEAN, b=PoolingType.SUM) if kind == "bags" else sequences("a", "b")
    kernels = row_wise(compute_kernel="fused"), table_wise(rank=0, compute_kernel="fused")
    names = ["a", "b"]
    dmp = shard(
        module,
        dict(zip(names, kernels, strict=True)),
        stock=False,
        coalesced=names if coalesced else [],
    )
    empty = KeyedJaggedTensor(
        keys=names,
        values=torch.zeros(0, dtype=torch.long),
        lengths=torch.zeros(0, dtype=torch.long),
        stride=None if deduplicated else 0,
        stride_per_key_per_rank=[[0], [0]] if deduplicated else None,
        inverse_indices=(names, torch.zeros(2, 0, dtype=torch.long)) if deduplicated else None,
    )
    some = vbe(*names) if deduplicated else plain(*names)
    moved = _step(dmp, empty if rank else some)
    shapes = []
    for batch in (empty if rank else some, empty):
        out = dmp(batch)
        if kind == "sequences":
            out["a"].values().sum().backward()
            shapes.append(list(out["a"].lengths().shape))
        else:
            out.values().sum().backward()
            shapes.append(list(out.values().shape))
    return shapes[0], shapes[1], moved


def features_in_another_order(rank: int, world_size: int, kind: str, stock: bool) -> float:
    """How far a feature's vectors are off where a later batch has its features in another order."""
    module = bags(a=PoolingType.SUM, b=PoolingType.SUM) if kind == "bags" else sequences("a", "b")
    table = table_wise(rank=0, compute_kernel="fused")
    dmp = shard(module, {"a": table, "b": table}, stock=stock)
    of_a, of_b = (
        KeyedJaggedTensor([n], torch.tensor([i]), lengths=torch.ones(1).int())
        for n, i in (("a", 1), ("b", 2))
    )
    found = []
    for batch in ([of_a, of_b], [of_b, of_a]):
        vectors = dmp(KeyedJaggedTensor.concat(batch))["a"]
        found.append(vectors if kind == "bags" else vectors.values())
    return float((found[0] - found[1]).abs().max())


def missing_feature(rank: int, world_size: int, kind: str) -> None:
    module = bags(a=PoolingType.SUM, b=PoolingType.SUM) if kind == "bags" else sequences("a", "b")
    table = table_wise(rank=0, compute_kernel="fused")
    dmp = shard(module, {"a": table, "b": table}, stock=False)
    dmp(plain("a"))
