"""Bytes that a plan predicts against those of all of a registry's batches, deduplicated."""

from __future__ import annotations

from pathlib import Path

import pytest

from recd_plugin_flexshard.planning import traffic
from recd_plugin_flexshard.planning.simulate import simulate
from recd_plugin_flexshard.planning.sources import RegistryBatches
from recd_plugins import load_registry
from recd_plugins.planning.study import ShardableModel, with_plugins
from recd_plugins.planning.topologies import this_machine

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {folder}/table, sparse: ["seq_0_*"], generate: {{rows: 4096}}}}
converter: {{use: {converter}}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 8000}}}}
pooling:
  - {{use: recd.mean, features: ["*"]}}
sharding:
  - use: flexshard.joint
    tables: ["*"]
    options: {{minimise: bytes, profile: {profile}}}
model: {{embedding_dim: 16, num_embeddings: 8000, bottom_mlp: [16], top_mlp: [16]}}
training: {{batch_size: 64}}
"""
STEPS = 16  # all batches of 4 ranks


def prepared(folder: Path, converter: str, profile: Path | str) -> ShardableModel:
    path = folder / "registry.yaml"
    path.write_text(REGISTRY.format(folder=folder, converter=converter, profile=profile))
    registry = load_registry(path)
    registry.dataset.prepare()
    return with_plugins(registry, this_machine(2, nodes=2))


def played_over_predicted(candidate: ShardableModel) -> dict[str, float]:
    (part,) = candidate.prepared.table_parts
    plan = part.plan
    tables = {table.name: table for table in candidate.tables}
    source = RegistryBatches(candidate.prepared, [tables[table.name] for table in plan.tables])
    played = simulate(plan, source, STEPS).tiered.tiers
    return {
        tier: (played[tier].sent_integers + played[tier].sent_floats).mean() / predicted.bytes
        for tier, predicted in traffic(plan).items()
    }


@pytest.mark.parametrize("converter", ["recd.kjt", "recd.ikjt", "recd.partial_ikjt"])
def test_every_tier_sends_what_is_predicted(tmp_path: Path, converter: str) -> None:
    ratios = played_over_predicted(prepared(tmp_path, converter, "null"))
    # A list of lengths as long as the most unique rows of any feature is not foreseen.
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=0.03)
