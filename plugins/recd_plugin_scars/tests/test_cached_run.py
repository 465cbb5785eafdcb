"""`recd run` with cached tables, killed and resumed: as if never killed, and as without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.programs import report_of, run_until_killed

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {folder}/table
    sparse: [item_0, "seq_0_*"]
    generate: {{rows: 2560, row_group_rows: 128}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 500}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
sharding:
  - {{use: torchrec.row_wise, tables: ["*"]}}
cache: {cache}
model: {{embedding_dim: 8, num_embeddings: 500, bottom_mlp: [16], top_mlp: [16]}}
training:
  batch_size: 32
  ranks: 2
  steps: 12
  device: cpu
  evaluate: false
  checkpoint: {checkpoint}
"""


def report(folder: Path, *arguments: str, cache: str = "[]", checkpoint: str = "{}") -> Any:
    return report_of("run", write(folder, cache, checkpoint), *arguments)


def write(folder: Path, cache: str, checkpoint: str) -> Path:
    registry = folder / "registry.yaml"
    registry.write_text(
        REGISTRY.format(folder=folder, cache=cache, checkpoint=checkpoint), encoding="utf-8"
    )
    return registry


def test_killed_and_resumed(tmp_path: Path) -> None:
    plain = report(tmp_path)
    rows = tmp_path / "rows"
    entry = f"policy: lru, share: 0.2, storage: {{file: {rows}}}"
    cache = f'[{{use: scars.cache, tables: ["*"], options: {{{entry}}}}}]'
    checkpoints = tmp_path / "checkpoints"
    checkpoint = f"{{path: {checkpoints}, every: 3, keep: 1}}"
    run_until_killed(write(tmp_path, cache, checkpoint), checkpoints, every=3, steps=12)

    resumed = report(tmp_path, "--resume", cache=cache, checkpoint=checkpoint)
    assert resumed["losses"] == plain["losses"]
