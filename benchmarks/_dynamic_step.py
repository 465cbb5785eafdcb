"""Step time of a model with dynamic tables, compared to tables of fixed ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from benchmarks._measure import Findings, Size, in_turn, lower, ratios

_ROWS: dict[Size, int] = {"tiny": 6_400, "small": 640_000, "reference": 1_280_000}
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


@contextmanager
def one_rank() -> Iterator[None]:
    """Let this process be the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module, use: str, fused_params: dict[str, Any]) -> DistributedModelParallel:
    """Shard the tables of a model with the sharding plugin ``use``."""
    torch.manual_seed(0)
    ready = recd_plugins.wrap(model, {"sharding": [{"use": use, "tables": ["*"]}]})
    sharders = ready.sharders(fused_params=fused_params)
    plan = ready.planner().collective_plan(ready.model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(ready.model, env, torch.device("cpu"), plan, sharders)


def zipf(ids: NDArray[np.int64], exponent: float) -> Callable[[int], Tensor]:
    """Return a function that draws a number of ids from a Zipf distribution."""
    draw = np.random.default_rng(0)
    ends = np.cumsum(np.arange(1, len(ids) + 1) ** -exponent)
    return lambda count: torch.from_numpy(ids[ends.searchsorted(ends[-1] * draw.random(count))])


def _trainer(use: str, rows: int) -> Callable[[KeyedJaggedTensor], None]:
    """Return a function that trains one batch with the sharding plugin ``use``."""
    model: Any = _Model(rows)
    dmp = sharded(model, use, {"learning_rate": 0.01})
    dense = torch.optim.SGD(model.top.parameters(), 0.01)

    def train(batch: KeyedJaggedTensor) -> None:
        dense.zero_grad()
        dmp(batch).backward()
        dense.step()

    return train


def step_over_fixed(size: Size) -> Findings:
    """Train the same batches with dynamic tables and with row-wise tables, in turns."""
    rows, rows_per_batch = _ROWS[size], 64 if size == "tiny" else 2048
    draw_ids = zipf(np.random.default_rng(0).permutation(rows)[: int(rows * _IDS)], _EXPONENT)
    lengths = torch.full((rows_per_batch * len(_FEATURES),), _LENGTH)
    batches = [
        KeyedJaggedTensor(_FEATURES, draw_ids(len(lengths) * _LENGTH), lengths=lengths)
        for _ in range(2 if size == "tiny" else 8)
    ]
    with one_rank():
        dynamic, fixed = (_trainer(use, rows) for use in ("dynamic.table", "torchrec.row_wise"))
        times = in_turn(dynamic, fixed, batches, turns=1 if size == "tiny" else 3)
    return Findings(
        f"{len(_FEATURES)} tables of {rows:,} rows, batches of {rows_per_batch:,} rows with "
        f"{_LENGTH} ids per table",
        [lower("step_over_fixed", ratios(*zip(*times, strict=True)), goal=1.15)],
    )
