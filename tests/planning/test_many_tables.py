"""Planning and reading of registries with many columns: work grows as they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.test_planner import registry
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import recd_plugins
from recd_plugins.planning.partitioner import RankPartitioner
from recd_plugins.registry import entries, patterns
from recd_plugins.registry.entries import Entry


def num_placed(num_tables: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the tables of all plans that the planner tries."""
    configs = [
        EmbeddingBagConfig(
            name=f"t_{i}", feature_names=[f"f_{i}"], num_embeddings=100 + i, embedding_dim=8
        )
        for i in range(num_tables)
    ]
    model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(configs, device="meta")})
    ready = recd_plugins.wrap(model)
    partition, placed = RankPartitioner.partition, 0

    def counted(self: RankPartitioner, proposal: Any, storage_constraint: Any) -> Any:
        nonlocal placed
        placed += len(proposal)
        return partition(self, proposal, storage_constraint)

    with monkeypatch.context() as patched:
        patched.setattr(RankPartitioner, "partition", counted)
        ready.planner(world_size=2).plan(model, ready.sharders())
    return placed


def test_plans_are_tried_for_twice_the_tables_in_about_twice_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recd_plugins.planning.proposers._MANY_TABLES", 32)
    assert num_placed(100, monkeypatch) < 3 * num_placed(50, monkeypatch)


def test_names_are_looked_up_and_only_globs_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def counted(name: str, pattern: str) -> bool:
        tried.append(pattern)
        return name.startswith(pattern.removesuffix("*"))

    monkeypatch.setattr(entries, "fnmatchcase", counted)
    monkeypatch.setattr(patterns, "fnmatchcase", counted)
    names = [f"t_{i}" for i in range(500)]
    entry: Entry[Any] = Entry(registry().dataset, (*names, "s_*"), "sharding[0]", 1)
    assert all(map(entry.matches, names))
    assert not tried
    assert entry.matches("s_1")
    assert not entry.matches("u_1")
    assert patterns.matched("t_7", dict.fromkeys(names)) == ["t_7"]
    assert patterns.matched("t_49*", dict.fromkeys(names))[0] == "t_49"
    assert set(tried) == {"s_*", "t_49*"}
