"""Where costs of nodes were measured, ranks send while they compute if that gains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recd_plugins import load_registry
from recd_plugins.planning.topologies import this_machine
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.assembly import assemble
from recd_plugins.values.stage_costs import AllReduceCost, LookupCost, StageCosts

REGISTRY = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {a: 9, b: 40}}}
converter: {use: recd.ikjt}
sharding: [{use: torchrec.row_wise, tables: ["t_*"]}]
training: {batch_size: 16, device: cpu}
model: {num_embeddings: 50, embedding_dim: 4, bottom_mlp: [4], top_mlp: [4]}
"""


def built(
    rank: int, world_size: int, path: Path, hidden: float | None, asked: bool | None
) -> tuple[str, bool | None, float | None]:
    """The pipeline, ``training.overlap``, and the seconds of an all-reduce that were predicted."""
    registry = load_registry(path).with_training({"overlap": asked})
    costs = StageCosts(
        lookup=LookupCost(steps=1.0), all_reduce=AllReduceCost(steps=1.0), hidden=hidden or 0.0
    )
    topology = this_machine(2).model_copy(update={"nodes": 2, "ranks_per_node": 1, "costs": costs})
    cpu = torch.device("cpu")
    parts = assemble(registry, "plugins", cpu, topology=None if hidden is None else topology)
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, cpu)
    predicted = None if parts.predicted is None else parts.predicted.stages.all_reduce
    return type(pipeline).__name__, parts.prepared.registry.training.overlap, predicted


@pytest.mark.parametrize(
    ("hidden", "asked", "expected"),
    [
        (None, None, ("OverlappedTrainPipeline", None, None)),
        (0.5, None, ("OverlappedTrainPipeline", None, 0.5)),
        (0.02, None, ("CheckedTrainPipeline", False, 1.0)),  # 1 % of a step
        (0.02, True, ("OverlappedTrainPipeline", True, 0.98)),
        (0.5, False, ("CheckedTrainPipeline", False, 1.0)),
    ],
)
def test_overlap_is_chosen_by_what_it_gains(
    tmp_path: Path,
    hidden: float | None,
    asked: bool | None,
    expected: tuple[str, bool | None, float | None],
) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY)
    load_registry(path).dataset.prepare()
    assert (
        run_on_ranks(built, 2, path, hidden, asked, local_world_size=1)
        == [(*expected[:2], pytest.approx(expected[2]))] * 2
    )
