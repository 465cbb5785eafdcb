from __future__ import annotations

from pathlib import Path

from tests.drop_in import pooled_sequences_cases as cases

import recd_plugins
from recd_plugins.testing.gloo import run_on_ranks

REGISTRY = """
version: 1
cache:
  - use: scars.cache
    tables: [t_bag, t_items]
    options: {{rows: 10, policy: lru, profile: {profile}}}
"""


def kernels(rank: int, world_size: int, registry: Path) -> dict[str, str]:
    _, dmp = cases.drop_in(registry)
    return {line.name: line.kernel for line in recd_plugins.describe_tables(dmp).lines}


def test_tables_are_described_as_cached(tmp_path: Path) -> None:
    path = cases.write_registry(tmp_path, REGISTRY, ["bag", "items"])
    cached, others = ("t_bag", "t_items"), ("t_actions", "t_alone")
    for found in run_on_ranks(kernels, 2, path):
        assert found == dict.fromkeys(cached, "fused_uvm_caching") | dict.fromkeys(others, "fused")
