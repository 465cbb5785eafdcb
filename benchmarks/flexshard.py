"""FlexShard's row tiers compared to row-wise sharding: all-to-all bytes and step time.

Ranks are gloo processes that simulate 4 nodes with 2 ranks each. Part ``rm2`` is a smaller table
with the popularity of the paper's RM-2 model, and tiers planned for the paper's 32 ranks. Part
``joint`` trains the PAPERCAL sequences with tiers and deduplication, separately and combined.
Part ``drift`` changes the popularity during training, with fixed tiers and with updated tiers.
All variants start from the same weights and train on the same rows, in alternating turns. They
send all gradients, as in the paper.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks import _flexshard_paper as paper
from benchmarks._flexshard_ranks import (
    FEATURE,
    STOCK,
    Drift,
    OneTable,
    Popularity,
    Sessions,
    Trained,
    measure_drift,
    measure_one_table,
    measure_sessions,
)
from benchmarks._measure import Detail, Findings, Size, higher, lower, max_abs_diff, ratios
from recd_plugin_flexshard.planning import TableDemand, TierPlan, plan_tiers, traffic
from recd_plugin_flexshard.runtime import RowTiers
from recd_plugins.config.from_file import load_registry
from recd_plugins.data.access import measure_access
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.model.build import build_model
from recd_plugins.runtime.launch import Ranks

PARTS = ("rm2", "joint", "drift")
OPTIONS = [click.Option(["--only"], type=click.Choice(PARTS), help="Measure only this part.")]
_RANKS_PER_NODE = 2
SHARDERS, TWO_TIER, THREE_TIER = "row-wise (ours)", "2-tier", "3-tier"
JOINT, LEAST_TIME = "joint, deduplicated", "joint for time, deduplicated"
#: Converter, sharding and sharding options of each variant of ``joint``.
_SIDES: Mapping[str, tuple[str, str, str]] = {
    STOCK: ("recd.kjt", "torchrec.row_wise", ""),
    SHARDERS: ("recd.kjt", "torchrec.row_wise", ""),
    TWO_TIER: ("recd.kjt", "flexshard.two_tier", "minimise: bytes"),
    THREE_TIER: ("recd.kjt", "flexshard.three_tier", "minimise: bytes"),
    "joint": ("recd.kjt", "flexshard.joint", "minimise: bytes"),
    "row-wise, deduplicated": ("recd.ikjt", "torchrec.row_wise", ""),
    JOINT: ("recd.ikjt", "flexshard.joint", "minimise: bytes"),
    LEAST_TIME: ("recd.ikjt", "flexshard.joint", "minimise: time"),
}
_REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {path}
    generate: {{rows: {rows}, seed: {seed}}}
    sparse: ["{features}"]
converter: {{use: {converter}}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 100000}}}}
pooling:
  - {{use: recd.attention, features: ["seq_*"]}}
sharding:
  - use: {sharding}
    tables: ["*"]
    options: {{{options}}}
model: {{embedding_dim: 16, num_embeddings: 100000}}
training:
  batch_size: {batch_size}
  ranks: {ranks}
  ranks_per_node: 2
  learning_rate: 0.1
  dense_learning_rate: 0.01
  eps: 1.0e-3
"""


@dataclass(frozen=True)
class _Sizes:
    """Size of each part of the benchmark.

    In ``rm2``, rows and batch size are divided by ``scale``. The fields from ``features`` to
    ``profiled``, the rows of a separate table, are for ``joint``, and those after it for ``drift``.
    """

    nodes: int
    scale: int
    dim: int
    batches: int
    turns: int
    features: str
    session_batch: int
    session_batches: int
    session_turns: int
    profiled: int
    drift_scale: int
    phases: int
    retier_every: int


_SIZES: dict[Size, _Sizes] = {
    "tiny": _Sizes(2, 2048, 32, 2, 1, "seq_0_1", 128, 2, 1, 2048, 2048, 2, 2),
    "small": _Sizes(4, 256, 16, 8, 3, "seq_0_0", 512, 2, 3, 32_768, 512, 2, 6),
    "reference": _Sizes(4, 64, 32, 8, 9, "seq_0_*", 512, 4, 9, 65_536, 256, 4, 8),
}


def run(size: Size, only: str | None = None) -> Findings:
    sizes, parts = _SIZES[size], (only,) if only else PARTS
    words = {
        "rm2": f"a table like RM-2's with rows and batch divided by {sizes.scale}",
        "joint": f"PAPERCAL's {sizes.features}, batch {sizes.session_batch}",
        "drift": f"a popularity that changes in {sizes.phases} phases",
    }
    workload = "; ".join(words[part] for part in parts)
    found = Findings(f"{workload}; on {sizes.nodes} simulated nodes x 2 gloo ranks", [])
    losses = []
    with Ranks(sizes.nodes * _RANKS_PER_NODE, local_world_size=_RANKS_PER_NODE) as ranks:
        for part, measure in (("rm2", _rm2), ("joint", _joint)):
            if part in parts:
                trained = measure(found, ranks, sizes)
                losses.append(max_abs_diff([each.losses for each in trained.values()]))
        if "drift" in parts:
            _drift(found, ranks, sizes)
    if losses:
        found.figures.append(lower("loss_max_abs_diff", max(losses), "loss", goal=1e-6))
    return found


def _rm2(found: Findings, ranks: Ranks, sizes: _Sizes) -> dict[str, Trained]:
    popularity, plans = _plans(sizes.scale, sizes.dim)
    sides: dict[str, RowTiers | None] = {STOCK: None, SHARDERS: RowTiers()}
    sides |= {
        side: _row_tiers(plan) for side, plan in plans.items() if side in (TWO_TIER, THREE_TIER)
    }
    batch_size = paper.CLUSTER.batch_size // sizes.scale
    job = OneTable(popularity, sizes.dim, batch_size, sizes.batches, sizes.turns, sides)
    trained = ranks.run(measure_one_table, job)[0]
    played = replace(
        paper.CLUSTER, batch_size=batch_size, nodes=sizes.nodes, ranks_per_node=_RANKS_PER_NODE
    )
    cold = {
        side: traffic(replace(plan, cluster=played))["cold"].bytes for side, plan in plans.items()
    }
    saved = {side: _saved(trained, side) for side in (TWO_TIER, THREE_TIER)}
    error = max(abs(saved[side] - 1 + cold[side] / cold["row-wise"]) for side in saved)
    found.figures.extend(
        [
            higher("rm2_a2a_reduction", saved[THREE_TIER], "share", paper=0.856, goal=0.856),
            higher("rm2_a2a_reduction_2_tier", saved[TWO_TIER], "share", paper=0.77),
            lower("rm2_step_time_over_row_wise", _times(trained, THREE_TIER)),
            lower("prediction_error_known_popularity", error, "share", goal=0.02),
        ]
    )
    _report(found, "rm2", trained)
    return trained


def _plans(scale: int, dim: int) -> tuple[Popularity, dict[str, TierPlan]]:
    """Plan tiers for RM-2's popularity on the paper's cluster, with a smaller batch."""
    popularity = Popularity.scaled(paper.MODELS["RM-2"].fitted(), scale)
    rows, probabilities = popularity.rows, popularity.probabilities
    demand = TableDemand(FEATURE, len(rows), dim, probabilities, rows)
    cluster = replace(paper.CLUSTER, batch_size=paper.CLUSTER.batch_size // scale)
    return popularity, {
        "row-wise": plan_tiers([demand], cluster, "row_wise"),
        TWO_TIER: plan_tiers([demand], cluster, "two_tier", paper.OPTIONS),
        THREE_TIER: plan_tiers([demand], cluster, "three_tier", paper.OPTIONS),
    }


def _row_tiers(plan: TierPlan) -> RowTiers:
    (table,) = plan.tables
    return RowTiers(table.hot_rows, table.flex_rows)


def _joint(found: Findings, ranks: Ranks, sizes: _Sizes) -> dict[str, Trained]:
    with tempfile.TemporaryDirectory() as folder:
        files = _registries(Path(folder), sizes)
        job = Sessions(files, sizes.session_batches, sizes.session_turns)
        trained = ranks.run(measure_sessions, job)[0]
    found.figures.extend(
        [
            higher("joint_a2a_reduction", _saved(trained, JOINT), "share", goal=0.94),
            higher("joint_a2a_reduction_least_time", _saved(trained, LEAST_TIME), "share"),
            lower("joint_step_time_over_row_wise", _times(trained, JOINT), goal=1),
        ]
    )
    _report(found, "joint", trained)
    return trained


def _registries(folder: Path, sizes: _Sizes) -> dict[str, Path]:
    """Write one registry file per variant. Generate the data and the access profiles."""
    ranks = sizes.nodes * _RANKS_PER_NODE
    rows = sizes.session_batch * sizes.session_batches * ranks
    common = {"features": sizes.features, "batch_size": sizes.session_batch, "ranks": ranks}

    def write(name: str, seed: int, num_rows: int, converter: str, use: str, options: str) -> Path:
        path = folder / f"{name}.yaml"
        data = {"path": folder / f"table-{seed}", "rows": num_rows, "seed": seed}
        text = _REGISTRY.format(
            **common, **data, converter=converter, sharding=use, options=options
        )
        path.write_text(text)
        return path

    profiles: dict[str, Path] = {}
    for converter in ("recd.kjt", "recd.ikjt"):
        profiles[converter] = folder / f"{converter}.parquet"
        registry = load_registry(
            write("profiled", 1, sizes.profiled, converter, "torchrec.row_wise", "")
        )
        registry.dataset.prepare()
        tables = tables_of(build_model(registry, registry.dataset.schema()))
        measure_access(registry, tables).save(profiles[converter])
    paths: dict[str, Path] = {}
    for number, (name, (converter, sharding, options)) in enumerate(_SIDES.items()):
        if options:
            options += f", profile: {profiles[converter]}"
        paths[name] = write(str(number), 0, rows, converter, sharding, options)
    load_registry(paths[STOCK]).dataset.prepare()
    return paths


def _drift(found: Findings, ranks: Ranks, sizes: _Sizes) -> None:
    popularity, plans = _plans(sizes.drift_scale, 8)
    batch_size = paper.CLUSTER.batch_size // sizes.drift_scale
    tiers = _row_tiers(plans[THREE_TIER])
    job = Drift(popularity, 8, batch_size, tiers, sizes.phases, sizes.retier_every)
    stay, follow = ranks.run(measure_drift, job)[0]
    regained = (stay[-1] - follow[-1]) / (stay[-1] - stay[0])
    found.figures.append(higher("retier_a2a_share_regained", regained, "share"))
    rows: list[list[str | float]] = [
        [str(phase), *pair] for phase, pair in enumerate(zip(stay, follow, strict=True))
    ]
    title = f"{job.moved:.0%} of the rows change in each phase; share of row-wise sharding's bytes"
    found.details.append(Detail(title, ["phase", "fixed tiers", "retier_every"], rows))


def _saved(trained: Mapping[str, Trained], side: str) -> float:
    """Return the fraction of all-to-all bytes saved compared to TorchRec's row-wise sharding."""
    return 1 - trained[side].all_to_all / trained[STOCK].all_to_all


def _times(trained: Mapping[str, Trained], side: str) -> list[float]:
    """Return step times divided by those of TorchRec's row-wise sharding, one per turn."""
    return ratios(trained[side].seconds, trained[STOCK].seconds)


def _report(found: Findings, part: str, trained: Mapping[str, Trained]) -> None:
    rows: list[list[Any]] = []
    for name, each in trained.items():
        others = sum(each.sent.values()) - each.all_to_all
        times = statistics.median(_times(trained, name))
        rows.append([name, each.all_to_all / 1e6, others / 1e6, _saved(trained, name), times])
    headings = ["", "all-to-all, MB", "other collectives, MB", "saved", "step time"]
    found.details.append(Detail(f"{part}: per rank and step", headings, rows))
