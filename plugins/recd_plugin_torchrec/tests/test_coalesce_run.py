"""A run with coalesced tables, of bags and in tiers of rows, is the run without."""

from __future__ import annotations

from pathlib import Path

import pytest

from recd_plugins.training.result import Result
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {folder}/table
    sparse: [usr_0, usr_1, "seq_0_*"]
    generate: {{rows: 1024, row_group_rows: 128}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 500}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
sharding:
  - {{use: torchrec.row_wise, tables: ["t_usr_*"], options: {{coalesce: {coalesce}}}}}
  - use: flexshard.two_tier
    tables: ["t_seq_*"]
    options: {{coalesce: {coalesce}, budget: 3x, minimise: bytes, memory_multiplier: 1}}
model: {{embedding_dim: 8, num_embeddings: 500, bottom_mlp: [16], top_mlp: [16], bag_pooling: mean}}
training: {{batch_size: 64, ranks: 2, steps: 6, optimizer: rowwise_adagrad, evaluate: false}}
"""


def train(folder: Path, coalesce: str) -> Result:
    path = folder / "registry.yaml"
    path.write_text(REGISTRY.format(folder=folder, coalesce=coalesce), encoding="utf-8")
    with session(Job(path)) as trainer:
        return trainer.train("plugins")


def test_a_run_is_that_without(tmp_path: Path) -> None:
    plain, coalesced = (train(tmp_path, each) for each in ("false", "true"))
    assert coalesced.losses == pytest.approx(plain.losses, abs=1e-6)
    assert coalesced.ids_looked_up is not None
    assert plain.ids_looked_up is not None
    assert coalesced.ids_looked_up < 0.8 * plain.ids_looked_up
    assert "tiers" in plain.sections
    assert "tiers" in coalesced.sections
