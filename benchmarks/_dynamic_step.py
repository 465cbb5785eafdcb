"""Step time of a model with dynamic tables, compared to tables of fixed ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from benchmarks._measure import Findings, Size, in_turn, lower, ratios

_ROWS: dict[Size, int] = {"tiny": 6_400, "small": 640_000, "reference": 6_400_000}
_FEATURES, _DIM, _LENGTH = [f"f{number}" for number in range(8)], 64, 5
_EXPONENT = 1.05  # of the Zipf law of ids
#: Share of a table's rows that are looked up as ids. The other rows are room for new ids.
_IDS = 0.8


class _Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{name}", feature_names=[name], num_embeddings=rows, embedding_dim=_DIM
                )
                for name in _FEATURES
            ],
            device=torch.device("meta"),
        )
        width = len(_FEATURES) * _DIM
        layers = [nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)]
        self.top = nn.Sequential(*layers)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.top(self.bags(features).values()).square().mean()


def _trainer(use: str, rows: int) -> Callable[[KeyedJaggedTensor], None]:
    """Return a function that trains one batch with the sharding plugin ``use``."""
    torch.manual_seed(0)
    ready = recd_plugins.wrap(_Model(rows), {"sharding": [{"use": use, "tables": ["*"]}]})
    params = {"learning_rate": 0.01}
    sharders = ready.sharders(fused_params=params)
    plan = ready.planner().collective_plan(ready.model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    device = torch.device("cpu")
    dmp = DistributedModelParallel(ready.model, env, device, plan, sharders)
    top: Any = ready.model.top
    dense = torch.optim.SGD(top.parameters(), 0.01)

    def train(batch: KeyedJaggedTensor) -> None:
        dense.zero_grad()
        dmp(batch).backward()
        dense.step()

    return train


def _batches(rows: int, size: int, number: int) -> list[KeyedJaggedTensor]:
    draw = np.random.default_rng(0)
    order = draw.permutation(rows)[: int(rows * _IDS)]
    lengths = torch.full((size * len(_FEATURES),), _LENGTH)
    ends = np.cumsum(np.arange(1, len(order) + 1) ** -_EXPONENT)
    made = []
    for _ in range(number):
        picked = np.searchsorted(ends, ends[-1] * draw.random(size * len(_FEATURES) * _LENGTH))
        ids = torch.from_numpy(order[picked])
        made.append(KeyedJaggedTensor(_FEATURES, ids, lengths=lengths))
    return made


def step_over_fixed(size: Size) -> Findings:
    """Train the same batches with dynamic tables and with row-wise tables, in turns."""
    rows, rows_per_batch = _ROWS[size], 64 if size == "tiny" else 2048
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        dynamic, fixed = (_trainer(use, rows) for use in ("dynamic.table", "torchrec.row_wise"))
        batches = _batches(rows, rows_per_batch, 2 if size == "tiny" else 8)
        times = in_turn(dynamic, fixed, batches, turns=1 if size == "tiny" else 3)
    finally:
        dist.destroy_process_group()
    return Findings(
        f"{len(_FEATURES)} tables of {rows:,} rows, batches of {rows_per_batch:,} rows with "
        f"{_LENGTH} ids per table",
        [lower("step_over_fixed", ratios(*zip(*times, strict=True)), goal=1.15)],
    )
