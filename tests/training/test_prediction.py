"""A step is predicted where costs were measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recd_plugins import load_registry
from recd_plugins.interfaces.step_cost import AllReduceCost, LookupCost, StageCosts
from recd_plugins.planning.topologies import this_machine
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.assembly import assemble

REGISTRY = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {a: 9, b: 40}}}
converter: {use: recd.ikjt}
sharding: [{use: torchrec.row_wise, tables: ["t_*"]}]
training: {batch_size: 16, device: cpu}
model: {num_embeddings: 50, embedding_dim: 4, bottom_mlp: [4], top_mlp: [4]}
"""
PLUGINS = Path(__file__).parents[1] / "model" / "plugins"


def predicted(
    rank: int, world_size: int, path: Path, asked: bool | None, costs: StageCosts | None
) -> float | None:
    """Seconds of lookups and an all-reduce, half of which may be hidden behind them."""
    registry = load_registry(path, plugins_dir=PLUGINS).with_training({"overlap": asked})
    spec = this_machine(2).model_copy(update={"nodes": 2, "ranks_per_node": 1, "costs": costs})
    topology = None if costs is None else spec
    parts = assemble(registry, "plugins", torch.device("cpu"), topology=topology)
    return parts.predicted


COSTS = StageCosts(lookup=LookupCost(steps=1.0), all_reduce=AllReduceCost(steps=1.0), hidden=0.5)


@pytest.mark.parametrize(
    ("asked", "costs", "expected"),
    [
        (None, None, None),
        (True, COSTS, 1.5),
        (False, COSTS, 2.0),
    ],
)
def test_a_step_is_predicted(
    tmp_path: Path, asked: bool | None, costs: StageCosts | None, expected: float | None
) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY)
    load_registry(path).dataset.prepare()
    found = run_on_ranks(predicted, 2, path, asked, costs, local_world_size=1)
    assert found == [pytest.approx(expected), None]
