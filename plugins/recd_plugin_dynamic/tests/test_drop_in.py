from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests import sharded
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from recd_plugins.testing.gloo import run_on_ranks

OPTIONS = {"buckets": 4, "eviction": "lfu", "half_life": 3, "min_count": 2}


def batches(rank: int) -> list[KeyedJaggedTensor]:
    """Batches with each row twice. New ids come with each batch."""
    draw = torch.Generator().manual_seed(rank)
    made = []
    for step in range(8):
        lists = []
        for low, high, factor in ((10 * step, 10 * step + 30, 2**56), (0, 60, 1)):
            for _ in range(4):
                size = int(torch.randint(0, 4, (1,), generator=draw))
                lists += [torch.randint(low, high, (size,), generator=draw) * factor] * 2
        lengths = torch.tensor([len(each) for each in lists])
        made.append(KeyedJaggedTensor(["a", "b"], torch.cat(lists), lengths=lengths))
    return made


def outputs(rank: int, size: int, deduplicated: bool, coalesce: bool) -> list[list[float]]:
    torch.manual_seed(1)
    options = {**OPTIONS, "coalesce": coalesce}
    sections = {"sharding": [{"use": "dynamic.table", "tables": ["t_a"], "options": options}]}
    model = nn.Sequential(sharded.bags("a", "b", rows=60))
    ready = recd_plugins.wrap(model, sections, batch_size=8)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    sharders = ready.sharders(fused_params=params)
    plan = ready.planner().collective_plan(ready.model, sharders, sharded.everyone().process_group)
    dmp = sharded.sharded(ready.model, plan, sharders, sharded.CPU, with_weights=False)
    for name, each in dmp.state_dict().items():
        if name.endswith("weight"):
            for shard in each.local_shards():
                rows = torch.arange(len(shard.tensor)) + shard.metadata.shard_offsets[0]
                shard.tensor.copy_(rows.sin()[:, None].expand_as(shard.tensor))
    found = []
    own: Any = batches(rank)
    for batch in ready.dedup(own) if deduplicated else own:
        values = dmp(batch).wait().values()
        values.square().sum().backward()
        found.append(values.flatten().tolist())
    return found


@pytest.mark.parametrize(("size", "coalesce"), [(1, False), (2, False), (2, True)])
def test_deduplicated_batches_train_alike(size: int, coalesce: bool) -> None:
    plain = run_on_ranks(outputs, size, False, False)
    deduplicated = run_on_ranks(outputs, size, True, coalesce)
    assert any(any(each) for each in plain[0][1:])
    for own, other in zip(plain, deduplicated, strict=True):
        for values, others in zip(own, other, strict=True):
            assert values == pytest.approx(others, abs=1e-5)
