"""Planning and reading of registries with many columns: work grows as they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import recd_plugins
from recd_plugins.planning import search


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
    place, placed = search.place, 0

    def counted(proposal: Any, *others: Any) -> Any:
        nonlocal placed
        placed += len(proposal)
        return place(proposal, *others)

    with monkeypatch.context() as patched:
        patched.setattr(search, "place", counted)
        ready.planner(world_size=2).plan(model, ready.sharders())
    return placed


def test_plans_are_tried_for_twice_the_tables_in_about_twice_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recd_plugins.planning.search._MANY_TABLES", 32)
    assert num_placed(100, monkeypatch) < 3 * num_placed(50, monkeypatch)
