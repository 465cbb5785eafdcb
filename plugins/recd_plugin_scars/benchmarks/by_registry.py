"""What a user does: one registry with ``scars.cache`` and one without, trained by ``recd run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recd_plugins.api.training import Result, loss_max_abs_diff, session
from recd_plugins.testing.benchmark import Detail, Figure

_ROWS, _BATCH_SIZE = 50_000, 256
_PLAIN = """
sharding:
  - {use: torchrec.row_wise, tables: ["*"]}
"""
_CACHED = """
sharding:
  - {use: torchrec.row_wise, tables: ["*"], options: {coalesce: true}}
cache:
  - {use: scars.cache, tables: ["*"], options: {share: 0.1}}
"""
_REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {folder}/table, sparse: [item_0, usr_0, "seq_0_*"], generate: {{rows: {rows}}}}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: {table_rows}}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
{tables}
model: {{embedding_dim: 16, num_embeddings: {table_rows}}}
training:
  batch_size: {batch_size}
  ranks: {ranks}
  steps: {steps}
  device: cpu
  evaluate: false
  learning_rate: 0.1
  dense_learning_rate: 0.01
  eps: 1.0e-3
"""


@dataclass(frozen=True)
class ByRegistry:
    """Two runs on the same data from the same weights."""

    plain: Result
    cached: Result

    def figures(self) -> list[Figure]:
        """The figure of whether both train the same."""
        return [
            Figure.of(
                "registry_loss_max_abs_diff",
                [loss_max_abs_diff(self.cached, self.plain)],
                unit="loss",
                better="lower",
                goal=1e-6,
            )
        ]

    def details(self) -> list[Detail]:
        """First and last loss of each."""
        return [
            Detail(
                "recd run, a registry without and with scars.cache",
                ["", "first loss", "last loss"],
                [
                    [name, result.losses[0], result.losses[-1]]
                    for name, result in (
                        ("without", self.plain),
                        ("coalesced, scars.cache", self.cached),
                    )
                ],
            )
        ]


def measure_by_registry(steps: int, folder: Path, ranks: int = 2) -> ByRegistry:
    """Train both, in processes of their own.

    Args:
        steps: of each.
        folder: for registries and the table.
        ranks: that train.
    """
    results = []
    for name, tables in (("without", _PLAIN), ("with", _CACHED)):
        path = folder / f"{name}.yaml"
        path.write_text(
            _REGISTRY.format(
                folder=folder,
                rows=(steps + 2) * _BATCH_SIZE * ranks,
                table_rows=_ROWS,
                tables=tables,
                batch_size=_BATCH_SIZE,
                ranks=ranks,
                steps=steps,
            ),
            encoding="utf-8",
        )
        with session(path, overrides={}) as trainer:
            results.append(trainer.train("plugins"))
    return ByRegistry(*results)
