"""Tiers in a trainer that exists, which pools sequences over unique rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in import pooled_sequences_cases as cases

from recd_plugin_flexshard.runtime import ShardedTieredEmbeddingCollection
from recd_plugins.testing.gloo import run_on_ranks

REGISTRY = """
version: 1
sharding:
  - use: flexshard.two_tier
    tables: [t_items, t_actions]
    options: {{profile: {profile}, budget: 2x}}
"""


def losses(rank: int, world_size: int, registry: Path | None, deduplicated: bool) -> list[float]:
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    ready, dmp = cases.drop_in(registry, params)
    tiered = any(isinstance(m, ShardedTieredEmbeddingCollection) for m in dmp.modules())
    assert tiered == (registry is not None)
    batches = list(cases.batches(rank))
    found = []
    for batch in ready.dedup(batches) if deduplicated else batches:
        loss, value = dmp(batch)
        loss.backward()
        with torch.no_grad():
            for parameter in dmp.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        found.append(float(value))
    return found


def test_pooled_sequences_in_tiers(tmp_path: Path) -> None:
    path = cases.write_registry(tmp_path, REGISTRY, ["items", "actions"])
    without = run_on_ranks(losses, 2, None, False)
    assert np.ptp(without[0]) > 1e-3  # it learns
    for deduplicated in (False, True):
        tiered = run_on_ranks(losses, 2, path, deduplicated)
        assert tiered == [pytest.approx(each, abs=1e-6) for each in without]
