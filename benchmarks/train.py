"""Training with deduplication compared to stock TorchRec, on synthetic session data."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._measure import Findings, Size
from benchmarks._stock import RANKS, SIZES, figures_over_stock

_REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {folder}/table, generate: {{rows: {rows}}}}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 100000}}}}
pooling:
  - {{use: recd.attention, features: ["seq_*"]}}
model: {{embedding_dim: 16, num_embeddings: 100000, bag_pooling: mean}}
training:
  batch_size: {batch_size}
  ranks: {ranks}
  steps: {steps}
  learning_rate: 0.1
  dense_learning_rate: 0.01
  eps: 1.0e-3
"""


def run(size: Size) -> Findings:
    """Train pairs of runs, stock and with plugins."""
    steps, pairs, batch_size = SIZES[size]
    rows = (steps + 2) * batch_size * RANKS
    with tempfile.TemporaryDirectory() as folder:
        registry = Path(folder, "registry.yaml")
        registry.write_text(
            _REGISTRY.format(
                folder=folder, rows=rows, batch_size=batch_size, ranks=RANKS, steps=steps
            )
        )
        figures = figures_over_stock(registry, pairs, paper="2.48 (with larger batches)", goal=3)
    return Findings(
        f"PAPERCAL clustered by session, {RANKS} ranks x batch {batch_size}, {steps} steps, "
        f"{pairs} pair(s) of runs",
        figures,
    )
