"""A model with a table for each kind of sharding, and its batches."""

from typing import Any

import torch
import torch.distributed as dist
from tests.sharded import PLACES, bags, exact_sharders, sequences, shard
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import TrainingSpec

TRAINING = TrainingSpec()
FEATURES = tuple(PLACES)
ROWS = 40


class Model(nn.Module):
    """One pooled table for each kind of sharding, and sequences of a row-wise table."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(*FEATURES, rows=ROWS, dim=8)
        self.sequences = sequences("s", rows=ROWS, dim=8)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.bags(features).values().square().sum()
        return pooled + self.sequences(features)["s"].values().square().sum()


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(7 * step + rank)
    keys = [*FEATURES, "s"]
    ids = torch.randint(ROWS, (len(keys) * 3,), generator=generator)
    return KeyedJaggedTensor(keys, ids, lengths=torch.tensor([2, 1] * len(keys)))


def sharded_model(places: dict[str, str] | None = None) -> DistributedModelParallel:
    """Shard the model as its tables' names say, or as in ``places``."""
    torch.manual_seed(0)
    named = {f"t_{name}": name for name in FEATURES} | {"t_s": "row_wise"}
    return shard(Model(), exact_sharders(TRAINING), places or named, torch.device("cpu"))


def everything(dmp: DistributedModelParallel, optimizer: Any) -> dict[str, list[float]]:
    """Weights and optimizer state, whole tensors, on every rank."""
    states = {**dmp.state_dict()}
    for name, state in optimizer.state_dict()["state"].items():
        states.update({f"{name}/{key}": value for key, value in state.items()})
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: _parts(each) for name, each in states.items()})
    whole: dict[str, Tensor] = {}
    for name, (size, dtype, shards) in (each for of_rank in parts for each in of_rank.items()):
        tensor = whole.setdefault(name, torch.zeros(size, dtype=dtype))
        for window, values in shards:
            tensor[window] = values
    return {name: each.flatten().tolist() for name, each in whole.items()}


def _parts(value: Any) -> tuple[Any, Any, list[Any]]:
    if not isinstance(value, ShardedTensor):
        value = torch.as_tensor(value).detach()
        return value.size(), value.dtype, [((), value)]
    shards = [(each.metadata, each.tensor.detach()) for each in value.local_shards()]
    return (
        value.size(),
        value.dtype,
        [
            (
                tuple(slice(a, a + n) for a, n in zip(m.shard_offsets, m.shard_sizes, strict=True)),
                each,
            )
            for m, each in shards
        ],
    )
