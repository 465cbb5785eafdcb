"""A model with a table for each kind of sharding, and its batches."""

from __future__ import annotations

import torch
from tests.sharded import PLACES, bags, exact_sharders, sequences, shard
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import TrainingSpec

TRAINING = TrainingSpec()
FEATURES = tuple(PLACES)
ROWS = 40


class Model(nn.Module):
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
