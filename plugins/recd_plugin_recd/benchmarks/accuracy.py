"""Whether a model learns as well from rows clustered by session as from interleaved ones.

A batch of clustered rows holds a few whole sessions, whose rows resemble each other. Each source of
data is trained on in both orders: the same rows, the same initial weights, one pass, learning rates
that were chosen for the interleaved order. Other sessions are held out for the test.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_recd.papercal import SCHEMA, Layout, chunks, make_rows, row_keys
from recd_plugins.api.distributed import launch
from recd_plugins.api.training import Quality, Side, session
from recd_plugins.testing.benchmark import Figure, Size, movielens

SUMMARY = "NE and AUC after training on clustered and on interleaved rows (RecD, section 6.2)"

ROWS: dict[Size, int] = {"tiny": 1024, "small": 32_768, "reference": 393_216}
TEST_ROWS: dict[Size, int] = {"tiny": 256, "small": 16_384, "reference": 65_536}
NUM_SEEDS: dict[Size, int] = {"tiny": 1, "small": 3, "reference": 3}
TEST_SEED = 1000
_ROW_GROUP_ROWS = 2048

# The label follows the first four features and the dense ones; the others are noise.
_SPARSE = ("seq_0_0", "usr_0", "item_0", "item_1", "usr_1", "item_2")
_COLUMNS = ["session_id", "ts", "label", *(f"dense_{i}" for i in range(13)), *_SPARSE]

PAPERCAL_REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {path}, test_path: {test_path}, shuffle: {shuffle}, seed: {seed}}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 200000}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
model: {{embedding_dim: 16, num_embeddings: 200000, bag_pooling: mean}}
training:
  batch_size: 256
  learning_rate: 0.2
  dense_learning_rate: 0.01
  eps: 1.0e-3
  device: cpu
"""

MOVIELENS_REGISTRY = """
version: 1
dataset:
  use: recd.interactions
  options: {{path: {path}, order: {order}, refresh: {{per: request}}}}
converter: {{use: recd.ikjt}}
pooling:
  - {{use: recd.mean, features: ["history_*"]}}
model:
  embedding_dim: 16
  tables:
    t_user_id: {{num_embeddings: 944}}
    t_hour: {{num_embeddings: 24}}
    "t_*": {{num_embeddings: 1683}}
training:
  batch_size: 256
  learning_rate: 0.4
  dense_learning_rate: 0.01
  eps: 1.0e-3
  device: cpu
"""


@dataclass(frozen=True)
class Trial:
    """One training run: a registry file's text, and whether its plugins are used."""

    registry: str
    side: Side


#: Trials of one seed by what they are: interleaved, clustered, plain, shuffled.
Trials = Mapping[str, Trial]


def workload(size: Size) -> str:
    """The input in words."""
    text = f"PAPERCAL, {ROWS[size]:,} rows, {NUM_SEEDS[size]} tables and initial weights"
    if movielens() is not None:
        text += f"; MovieLens-100K, {NUM_SEEDS[size]} initial weights"
    return f"{text}; one pass, batches of 256"


def run(size: Size) -> list[Figure]:
    """Train in every order on every seed."""
    with tempfile.TemporaryDirectory() as folder:
        path = movielens()  # first: what is not there is said at once
        sources = {"papercal": papercal_trials(Path(folder), size)}
        if path is not None:
            sources["movielens"] = [_movielens_trials(path)] * NUM_SEEDS[size]
        # One process serves all trials: to start one takes longer than most of them. One thread:
        # steps are so small that a second one mostly waits, and on a busy machine costs far more.
        return [
            figure
            for name, trials in sources.items()
            for figure in figures(name, launch(train_all, 1, Path(folder), trials, threads=1)[0])
        ]


def train_all(
    _rank: int, _world_size: int, folder: Path, trials: list[Trials]
) -> list[dict[str, Quality]]:
    """Quality on the test split of each trial, seed by seed."""
    registry = folder / "registry.yaml"
    qualities: list[dict[str, Quality]] = []
    for seed, of_seed in enumerate(trials):
        qualities.append({})
        for name, trial in of_seed.items():
            registry.write_text(trial.registry, encoding="utf-8")
            with session(registry, overrides={"seed": seed}) as trainer:
                quality = trainer.train(trial.side).test
            assert quality is not None, "every source has a test split"
            qualities[-1][name] = quality
    return qualities


def figures(source: str, qualities: list[dict[str, Quality]]) -> list[Figure]:
    """Quality of the interleaved order, and what other trials differ from it, pair by pair."""

    def ne(name: str) -> list[float]:
        return [of_seed[name].normalized_entropy for of_seed in qualities]

    def auc(name: str) -> list[float]:
        return [of_seed[name].auc for of_seed in qualities]

    def minus(first: list[float], second: list[float]) -> list[float]:
        return [one - other for one, other in zip(first, second, strict=True)]

    found = [
        Figure.of(f"{source}_ne_interleaved", ne("interleaved"), unit="NE", better="lower"),
        Figure.of(f"{source}_auc_interleaved", auc("interleaved"), unit="AUC", better="higher"),
    ]
    for order in ("clustered", "shuffled"):
        if order in qualities[0]:
            name = f"{order}_minus_interleaved"
            ne_change = minus(ne(order), ne("interleaved"))
            auc_change = minus(auc(order), auc("interleaved"))
            found += [
                Figure.of(f"{source}_ne_{name}", ne_change, unit="NE", better="lower"),
                Figure.of(f"{source}_auc_{name}", auc_change, unit="AUC", better="higher"),
            ]
    for measure, of in (("ne", ne), ("auc", auc)):
        difference = [abs(value) for value in minus(of("clustered"), of("plain"))]
        name = f"{source}_{measure}_dedup_abs_diff"
        unit = measure.upper()
        found.append(Figure.of(name, difference, unit=unit, better="lower", goal=1e-4))
    return found


def papercal_trials(folder: Path, size: Size) -> list[Trials]:
    """Trials on tables written to ``folder``, of other rows for each seed."""
    test = folder / "test.parquet"
    write_table(test, TEST_ROWS[size], TEST_SEED, "clustered")
    seeds = range(NUM_SEEDS[size])
    return [_papercal_trials(folder, ROWS[size], seed, test) for seed in seeds]


def write_table(path: Path, rows: int, seed: int, layout: Layout) -> None:
    """The columns of PAPERCAL that the model uses."""
    schema = pa.schema([SCHEMA.field(name) for name in _COLUMNS])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for keys in chunks(row_keys(rows, seed, layout), _ROW_GROUP_ROWS):
            writer.write_batch(make_rows(keys).select(_COLUMNS), row_group_size=_ROW_GROUP_ROWS)


def _papercal_trials(folder: Path, rows: int, seed: int, test: Path) -> Trials:
    def registry(layout: Layout, shuffle: bool = False) -> str:
        path = folder / f"{layout}_{seed}.parquet"
        if not path.exists():
            write_table(path, rows, seed, layout)
        return PAPERCAL_REGISTRY.format(
            path=quoted(path),
            test_path=quoted(test),
            shuffle=str(shuffle).lower(),
            seed=seed,
        )

    return {
        "interleaved": Trial(registry("interleaved"), "baseline"),
        "clustered": Trial(registry("clustered"), "plugins"),
        "plain": Trial(registry("clustered"), "baseline"),
        "shuffled": Trial(registry("clustered", shuffle=True), "plugins"),
    }


def _movielens_trials(path: Path) -> Trials:
    by_time, by_session = (
        MOVIELENS_REGISTRY.format(path=quoted(path), order=order) for order in ("time", "session")
    )
    return {
        "interleaved": Trial(by_time, "baseline"),
        "clustered": Trial(by_session, "plugins"),
        "plain": Trial(by_session, "baseline"),
    }


def quoted(path: Path) -> str:
    """As a YAML string: a path may hold any character."""
    return json.dumps(str(path), ensure_ascii=False)
