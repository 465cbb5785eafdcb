"""Training with the RecD plugins against stock TorchRec, on the demo's model and PAPERCAL."""

from __future__ import annotations

import tempfile
from pathlib import Path

from recd_plugins.testing.against_stock import figures_over_stock
from recd_plugins.testing.benchmark import Figure, Size

SUMMARY = "training on 2 ranks, stock TorchRec against deduplicated (RecD)"

_STEPS: dict[Size, int] = {"tiny": 6, "small": 12, "reference": 30}
_PAIRS: dict[Size, int] = {"tiny": 1, "small": 1, "reference": 5}
_BATCH_SIZES: dict[Size, int] = {"tiny": 32, "small": 512, "reference": 512}
_RANKS = 2

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


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL clustered by session, {_RANKS} ranks x batch {_BATCH_SIZES[size]}, "
        f"{_STEPS[size]} steps, {_PAIRS[size]} pair(s) of runs"
    )


def run(size: Size) -> list[Figure]:
    """Pairs of runs, baseline and plugins, each in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        registry = Path(folder) / "registry.yaml"
        registry.write_text(
            _REGISTRY.format(
                folder=folder,
                rows=(_STEPS[size] + 2) * _BATCH_SIZES[size] * _RANKS,
                batch_size=_BATCH_SIZES[size],
                ranks=_RANKS,
                steps=_STEPS[size],
            ),
            encoding="utf-8",
        )
        return figures_over_stock(
            registry, _PAIRS[size], paper="2.48 (with larger batches)", goal=3
        )
