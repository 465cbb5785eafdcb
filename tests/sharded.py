from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.sharding.build import build_sharders
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.rank_state import copy_weights

CPU = torch.device("cpu")
SGD = TrainingSpec(optimizer="sgd", learning_rate=1.0)


def configs(kind: Any, features: Iterable[str], rows: int, dim: int, **fields: Any) -> list[Any]:
    sizes = {"embedding_dim": dim, "num_embeddings": rows}
    return [
        kind(**{"name": f"t_{name}", "feature_names": [name], **sizes, **fields})
        for name in features
    ]


def bags(
    *features: str,
    rows: int = 12,
    dim: int = 4,
    means: Iterable[str] = (),
    weighted: bool = False,
    device: torch.device | None = None,
    **fields: Any,
) -> EmbeddingBagCollection:
    """Sums, but for the features of ``means``."""
    tables = configs(EmbeddingBagConfig, features, rows, dim, **fields)
    for table in tables:
        if table.feature_names[0] in means:
            table.pooling = PoolingType.MEAN
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted, device=device)


def sequences(
    *features: str, rows: int = 12, dim: int = 4, device: torch.device | None = None, **fields: Any
) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=configs(EmbeddingConfig, features, rows, dim, **fields), device=device
    )


def _on_a_node(index: int, size: int) -> Any:
    sharding = table_row_wise(host_index=index % (size // local_ranks()))

    def fused(*arguments: Any) -> Any:
        found = sharding(*arguments)
        found.compute_kernel = "fused"  # which table_row_wise() does not take
        return found

    return fused


#: How a table is sharded, given its number and the number of ranks.
PLACES: dict[str, Callable[[int, int], Any]] = {
    "table_wise": lambda index, size: table_wise(rank=index % size, compute_kernel="fused"),
    "row_wise": lambda index, size: row_wise(compute_kernel="fused"),
    "column_wise": lambda index, size: column_wise(
        ranks=[(index + shard) % size for shard in range(2)], compute_kernel="fused"
    ),
    "table_row_wise": _on_a_node,
    "data_parallel": lambda index, size: data_parallel(),
}


def local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def everyone() -> ShardingEnv:
    return ShardingEnv.from_process_group(dist.group.WORLD)


def plan_of(
    module: nn.Module,
    places: Any,
    sharder: Any,
    size: int,
    local: int,
    device_type: str = DEVICE.type,
) -> Any:
    """A plan of a module; ``places`` as in ``shard``."""
    by_table = {}
    for index, table in enumerate(sharder.shardable_parameters(module)):
        place = places[table] if isinstance(places, Mapping) else places
        by_table[table] = PLACES[place](index, size) if isinstance(place, str) else place
    return construct_module_sharding_plan(
        module, by_table, sharder, local_size=local, world_size=size, device_type=device_type
    )


def shard(
    model: nn.Module,
    sharders: Sequence[Any],
    places: Any,
    device: torch.device = DEVICE,
    *,
    with_weights: bool = True,
) -> DistributedModelParallel:
    """Shard a model, or a module, which keeps its weights by default.

    ``places`` is a name of ``PLACES`` or TorchRec's generator, for all tables or by table.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    plan: dict[str, Any] = {}
    for path, module in model.named_modules():
        inside = any(not above or path.startswith(f"{above}.") for above in plan)
        if type(module) in by_type and not inside:
            sharder = by_type[type(module)]
            plan[path] = plan_of(
                module, places, sharder, dist.get_world_size(), local_ranks(), device.type
            )
    return sharded(model, ShardingPlan(plan), sharders, device, with_weights=with_weights)


def sharded(
    model: nn.Module,
    plan: ShardingPlan | None,
    sharders: Sequence[ModuleSharder[Any]],
    device: torch.device = DEVICE,
    *,
    with_weights: bool = True,
) -> DistributedModelParallel:
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    dmp = DistributedModelParallel(
        model, env=everyone(), device=device, plan=plan, sharders=list(sharders)
    )
    if with_weights:
        state = dmp.state_dict()
        copy_weights({name: state[name] for name in weights}, weights)
        dmp.load_state_dict(state)
    return dmp


def bare_registry(training: TrainingSpec) -> Any:
    return SimpleNamespace(training=training, sharding=(), cache=())


def exact_sharders(registry: Any, coalesced: Iterable[str] = ()) -> list[Any]:
    if isinstance(registry, TrainingSpec):
        registry = bare_registry(registry)
    prepared: Any = SimpleNamespace(
        registry=registry,
        model=nn.Module(),
        plugin_strategies=(),
        tables=(),
        coalesced=frozenset(coalesced),
        chosen=None,
    )
    return list(build_sharders(prepared))


def local_weights(dmp: nn.Module) -> dict[str, Tensor]:
    """This rank's shards by name, flat; of whole tensors all."""
    found = {}
    for name, value in dmp.state_dict().items():
        of_rank = value.local_shards() if isinstance(value, ShardedTensor) else None
        parts = [value] if of_rank is None else [shard.tensor for shard in of_rank]
        found[name] = torch.cat([torch.empty(0), *(p.detach().cpu().flatten() for p in parts)])
    return found


def whole(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return whole tensors on every rank. A rank may lack tensors that it has no rows of."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: _parts(each) for name, each in states.items()})
    own = parts.pop(dist.get_rank())
    found: dict[str, Tensor] = {}
    for name, (size, dtype, shards) in (e for of_rank in (*parts, own) for e in of_rank.items()):
        tensor = found.setdefault(name, torch.zeros(size, dtype=dtype))
        for window, values in shards:
            tensor[window] = values
    return found


def everything(dmp: nn.Module, optimizer: Any) -> dict[str, list[float]]:
    """Return weights and optimizer state of whole tensors on every rank."""
    states = {**dmp.state_dict()}
    for name, state in optimizer.state_dict()["state"].items():
        states.update({f"{name}/{key}": value for key, value in state.items()})
    return {name: each.flatten().tolist() for name, each in whole(states).items()}


def _parts(value: Any) -> tuple[Any, Any, list[Any]]:
    if not isinstance(value, ShardedTensor):
        value = torch.as_tensor(value).detach().cpu()
        return value.size(), value.dtype, [((), value)]
    shards = []
    for each in value.local_shards():
        at = zip(each.metadata.shard_offsets, each.metadata.shard_sizes, strict=True)
        window = tuple(slice(first, first + size) for first, size in at)
        shards.append((window, each.tensor.detach().cpu()))
    return value.size(), value.dtype, shards


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
