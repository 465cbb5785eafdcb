"""PAPERCAL's sequences: tiers and deduplication, each alone and planned together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recd_plugin_flexshard.benchmarks.one_table_plans import NODES, RANKS_PER_NODE

Sharders = Literal["stock", "plugins"]


@dataclass(frozen=True)
class Workload:
    """How much is trained.

    Attributes:
        features: patterns of the sequence features.
        batch_size: rows of a rank.
        num_batches: of a rank, which go round.
        turns: timed turns of one step of each side.
        profiled: rows, of another table, that the access profile has seen.
        nodes: of the ranks.
    """

    features: tuple[str, ...]
    batch_size: int
    num_batches: int
    turns: int
    profiled: int
    nodes: int = NODES

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * RANKS_PER_NODE


@dataclass(frozen=True)
class Side:
    """One way to train the same model on the same rows.

    Attributes:
        converter: plain KeyedJaggedTensors or deduplicated ones.
        sharding: plugin of all tables.
        options: of that plugin.
        sharders: those of the plugins, or TorchRec's own.
    """

    converter: Literal["recd.kjt", "recd.ikjt"]
    sharding: str
    options: str = ""
    sharders: Sharders = "plugins"


STOCK = "row-wise (TorchRec)"
JOINT = "joint, deduplicated"
#: With the default of ``minimise``.
LEAST_TIME = "joint for time, deduplicated"
SIDES: Mapping[str, Side] = {
    STOCK: Side("recd.kjt", "torchrec.row_wise", sharders="stock"),
    "row-wise (ours)": Side("recd.kjt", "torchrec.row_wise"),
    "2-tier": Side("recd.kjt", "flexshard.two_tier", "minimise: bytes"),
    "3-tier": Side("recd.kjt", "flexshard.three_tier", "minimise: bytes"),
    "joint": Side("recd.kjt", "flexshard.joint", "minimise: bytes"),
    "row-wise, deduplicated": Side("recd.ikjt", "torchrec.row_wise"),
    JOINT: Side("recd.ikjt", "flexshard.joint", "minimise: bytes"),
    LEAST_TIME: Side("recd.ikjt", "flexshard.joint", "minimise: time"),
}

NUM_EMBEDDINGS = 100_000
_DATASET = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {path}
    generate: {{rows: {rows}, seed: {seed}}}
    sparse: [{features}]
converter: {{use: {converter}}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: {num_embeddings}}}}}
pooling:
  - {{use: recd.attention, features: ["seq_*"]}}
sharding:
  - use: {sharding}
    tables: ["*"]
    options: {{{options}}}
model: {{embedding_dim: 16, num_embeddings: {num_embeddings}}}
training:
  batch_size: {batch_size}
  ranks: {ranks}
  ranks_per_node: {ranks_per_node}
  learning_rate: 0.1
  dense_learning_rate: 0.01
  eps: 1.0e-3
"""


def write_registries(folder: Path, workload: Workload) -> dict[str, Path]:
    """A registry file by side; the data is generated, and its accesses are counted."""
    from recd_plugins.api.access import measure_access
    from recd_plugins.api.model import build_model, tables_of
    from recd_plugins.api.registry import load_registry

    rows = workload.batch_size * workload.num_batches * workload.ranks
    profiles: dict[str, Path] = {}
    for side in SIDES.values():
        # What is sent is counted, which is less where the converter deduplicates.
        if side.converter in profiles:
            continue
        profile = profiles[side.converter] = folder / f"{side.converter}.parquet"
        other = folder / "profiled.yaml"
        other.write_text(_registry(folder, "profiled", workload, side, workload.profiled, 1))
        registry = load_registry(other)
        registry.dataset.prepare()
        tables = tables_of(build_model(registry, registry.dataset.schema()))
        measure_access(registry, tables).save(profile)

    paths: dict[str, Path] = {}
    for name, side in SIDES.items():
        paths[name] = folder / f"{len(paths)}.yaml"
        text = _registry(folder, "trained", workload, side, rows, 0, profiles[side.converter])
        paths[name].write_text(text)
    load_registry(paths[STOCK]).dataset.prepare()
    return paths


def _registry(
    folder: Path,
    table: str,
    workload: Workload,
    side: Side,
    rows: int,
    seed: int,
    profile: Path | None = None,
) -> str:
    options = [side.options] if side.options else []
    if side.sharding.startswith("flexshard.") and profile is not None:
        options.append(f"profile: {profile}")
    return _DATASET.format(
        path=folder / table,
        rows=rows,
        seed=seed,
        features=", ".join(workload.features),
        converter=side.converter,
        sharding=side.sharding,
        options=", ".join(options),
        num_embeddings=NUM_EMBEDDINGS,
        batch_size=workload.batch_size,
        ranks=workload.ranks,
        ranks_per_node=RANKS_PER_NODE,
    )
