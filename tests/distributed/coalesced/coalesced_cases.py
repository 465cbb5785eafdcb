"""Modules with coalesced tables next to the same without: outputs, gradients, bytes and errors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import SGD
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.runtime.errors import RecdError
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sharding.coalesced import input_dist
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    fused_params,
)
from recd_plugins.testing.device import DEVICE

DIM = 8
ROWS = 40
# t0 has two features, and s is of two tables.
FEATURES = {"t0": ["a", "b"], "t1": ["s"], "t2": ["s", "c"], "t3": ["d"]}
KEYS = ["d", "s", "b", "c", "a"]
TRAINING = TrainingSpec(optimizer="rowwise_adagrad", learning_rate=0.3, eps=1e-3)
GENERATORS: dict[str, Callable[[int], Any]] = {
    "table_wise": lambda index: table_wise(
        rank=index % dist.get_world_size(), compute_kernel="fused"
    ),
    "row_wise": lambda _: row_wise(compute_kernel="fused"),
    "column_wise": lambda index: column_wise(
        ranks=[index % dist.get_world_size(), 0], compute_kernel="fused"
    ),
    "data_parallel": lambda _: data_parallel(),
}


def bags(*, weighted: bool = False, pooling: PoolingType = PoolingType.SUM) -> nn.Module:
    return EmbeddingBagCollection(
        is_weighted=weighted,
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=ROWS,
                feature_names=features,
                pooling=pooling,
            )
            for name, features in FEATURES.items()
        ],
    )


def sequences(*, need_indices: bool = False) -> nn.Module:
    return EmbeddingCollection(
        need_indices=need_indices,
        tables=[
            EmbeddingConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=features
            )
            for name, features in FEATURES.items()
        ],
    )


def shard(
    module: nn.Module, sharding: str, coalesced: Collection[str], **sharder_options: Any
) -> DistributedModelParallel:
    kind = (
        ExactEmbeddingBagCollectionSharder
        if isinstance(module, EmbeddingBagCollection)
        else ExactEmbeddingCollectionSharder
    )
    sharder: ModuleSharder[Any] = kind(
        fused_params(TRAINING), coalesced=coalesced, **sharder_options
    )
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module,
        {
            table: GENERATORS[sharding if sharding != "mixed" else kind](index)
            for index, (table, kind) in enumerate(
                zip(FEATURES, ("table_wise", "row_wise", "row_wise", "column_wise"), strict=True)
            )
        },
        sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=size,
        device_type=DEVICE.type,
    )
    dmp = DistributedModelParallel(
        module=module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=DEVICE,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    random = torch.Generator().manual_seed(0)
    for name, tensor in sorted(dmp.state_dict().items()):
        whole = torch.randn(ROWS, DIM, generator=random)
        for shard in tensor.local_shards():
            rows, columns = (
                slice(start, start + size)
                for start, size in zip(
                    shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True
                )
            )
            shard.tensor.copy_(whole[rows, columns])
        assert name
    return dmp


def batch(rank: int, step: int, *, weighted: bool, dtype: torch.dtype) -> KeyedJaggedTensor:
    """Few rows are read often; the second batch of rank 0 has one row, the third no ids."""
    random = torch.Generator().manual_seed(10 * step + rank)
    size = 1 if (step, rank) == (1, 0) else 5 + rank
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=random)
    if (step, rank) == (2, 0):
        lengths.zero_()
    ids = (torch.rand(int(lengths.sum()), generator=random) ** 3 * ROWS).to(dtype)
    weights = torch.rand(len(ids), generator=random) if weighted else None
    return KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths, weights=weights)


@dataclass(frozen=True)
class Module:
    kind: str
    sharding: str
    coalesced: tuple[str, ...]
    weighted: bool = False
    pooling: PoolingType = PoolingType.SUM
    dtype: torch.dtype = torch.int64

    def make(self) -> nn.Module:
        if self.kind == "bags":
            return bags(weighted=self.weighted, pooling=self.pooling)
        return sequences(need_indices=True)


def differences(rank: int, world_size: int, modules: list[Module]) -> list[float]:
    """Between coalesced and not: outputs of four steps, weights and optimizer state after them."""
    return [_difference(rank, module) for module in modules]


def differences_with_empty_rows(rank: int, world_size: int, modules: list[Module]) -> list[float]:
    """The same, where groups of few ids have empty rows, as on CUDA."""
    with mock.patch.object(input_dist, "_takes_no_rows", return_value=False):
        return differences(rank, world_size, modules)


def _difference(rank: int, module: Module) -> float:
    states = []
    for coalesced in (module.coalesced, ()):
        dmp = shard(module.make(), module.sharding, coalesced)
        found: list[Tensor] = []
        for step in range(4):
            features = batch(rank, step, weighted=module.weighted, dtype=module.dtype)
            found += _outputs(dmp, features)
        state = dmp.fused_optimizer.state_dict()["state"]
        of_tables = [*dmp.state_dict().values(), *(t for v in state.values() for t in v.values())]
        found += [local.tensor.clone() for t in of_tables for local in t.local_shards()]
        states.append(found)
    mine, other = states
    assert [each.shape for each in mine] == [each.shape for each in other]
    return max(float((a - b).abs().max()) for a, b in zip(mine, other, strict=True) if a.numel())


def _outputs(dmp: nn.Module, features: KeyedJaggedTensor) -> list[Tensor]:
    output = dmp(features.to(DEVICE)).wait()
    if isinstance(output, dict):
        values = {name: jagged.values() for name, jagged in output.items()}
        extra = [t for j in output.values() for t in (j.lengths(), j.offsets())]
        extra += [w for j in output.values() if (w := j.weights_or_none()) is not None]
    else:
        values, extra = {name: output[name] for name in output.keys()}, []  # noqa: SIM118
    factors = {
        name: torch.arange(v.numel(), device=v.device).view_as(v).cos()
        for name, v in values.items()
    }
    sum((values[name].sin() * factors[name]).sum() for name in sorted(values)).backward()  # type: ignore[union-attr]
    return [values[name].detach() for name in sorted(values)] + [each.float() for each in extra]


def _factors(values: Tensor) -> Tensor:
    """Other ones for each scalar."""
    return torch.arange(values.numel(), device=values.device).view_as(values).cos()


def sent(
    rank: int, world_size: int, kind: str, sharding: str, coalesced: bool
) -> tuple[Counter[str], int, dict[str, int]]:
    """Bytes of one step, ids looked up, and this rank's distinct and all ids of each table."""
    dmp = shard(Module(kind, sharding, ()).make(), sharding, tuple(FEATURES) if coalesced else ())
    features = batch(rank, 0, weighted=False, dtype=torch.int64)
    with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
        _outputs(dmp, features)
    by_key = {name: jagged.values() for name, jagged in features.to_dict().items()}
    # Ids of s are unique with none of t2's other feature: s is of t1, too.
    groups = {"ab": ["a", "b"], "s": ["s"], "c": ["c"], "d": ["d"]}
    distinct = {
        name: len(torch.unique(torch.cat([by_key[each] for each in names])))
        for name, names in groups.items()
    }
    total: Counter[str] = Counter()
    for traffic, num_bytes in counter.sent.items():
        total[f"{traffic.phase} {traffic.payload}"] += num_bytes
    return total, ids.total, distinct


def refusals(rank: int, world_size: int) -> list[str]:
    """What is refused, in words."""
    attempts: list[Callable[[], object]] = [
        lambda: shard(bags(), "data_parallel", ["t0"]),
        lambda: shard(sequences(), "data_parallel", ["t3"]),
        lambda: shard(bags(), "table_wise", ["t1"]),
        lambda: shard(sequences(), "table_wise", ["t1", "t2"], use_index_dedup=True),
        lambda: shard(_clipping(bags()), "table_wise", ["t3"]),
        lambda: shard(_clipping(sequences()), "table_wise", ["t3"]),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
            found.append("")
        except RecdError as error:
            found.append(str(error))
    return found


def _codecs() -> Any:
    config = QCommsConfig(CommType.INT8, CommType.BF16)
    return get_qcomm_codecs_registry(config, device=torch.device("cpu"))


def _clipping(module: nn.Module) -> nn.Module:
    arguments = {"lr": 1.0, "gradient_clipping": True}
    apply_optimizer_in_backward(SGD, module.parameters(), arguments)
    return module


def out_of_range(rank: int, world_size: int, kind: str) -> list[Tensor]:
    """Outputs for ids that the table does not have, coalesced and not."""
    found = []
    for coalesced in (tuple(FEATURES), ()):
        dmp = shard(bags() if kind == "bags" else sequences(), "table_wise", coalesced)
        ids = torch.tensor([ROWS, 3, ROWS, -5, 2**40, 3] * len(KEYS))
        lengths = torch.tensor([4, 2] * len(KEYS))
        found.append(
            torch.cat(
                [
                    each.flatten()
                    for each in _outputs(
                        dmp, KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths)
                    )
                ]
            )
        )
    return found
