"""Tiers in a trainer that exists, which pools sequences over unique rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in import pooled_sequences_cases as cases
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

import recd_plugins
from recd_plugin_flexshard.runtime import ShardedTieredEmbeddingCollection
from recd_plugins.api.access import AccessProfile, zipf
from recd_plugins.testing.gloo import run_on_ranks

REGISTRY = """
version: 1
sharding:
  - use: flexshard.two_tier
    tables: [t_items, t_actions]
    options: {{profile: {profile}, budget: 2x}}
"""


def losses(rank: int, world_size: int, registry: Path | None, deduplicated: bool) -> list[float]:
    """Of SGD over the dense layers, from the same weights; the tables learn by themselves."""
    model = cases.Wrapped()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ready = recd_plugins.wrap(model, registry) if registry else recd_plugins.wrap(model)
    sharders = ready.sharders(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    )
    dmp = DistributedModelParallel(
        ready.model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=cases.CPU,
        plan=ready.planner().collective_plan(ready.model, sharders, dist.group.WORLD),
        sharders=sharders,
    )
    cases.copy_weights(dmp.state_dict(), weights)
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
    tables = {
        f"t_{name}": zipf(f"t_{name}", cases.ROWS, 4.0, 1.1, features=(name,))
        for name in ("items", "actions")
    }
    AccessProfile(tables, "Zipf's law").save(tmp_path / "accesses.parquet")
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY.format(profile=tmp_path / "accesses.parquet"), encoding="utf-8")
    without = run_on_ranks(losses, 2, None, False)
    assert np.ptp(without[0]) > 1e-3  # it learns
    for deduplicated in (False, True):
        tiered = run_on_ranks(losses, 2, path, deduplicated)
        assert tiered == [pytest.approx(each, abs=1e-6) for each in without]
