"""Training with requests dealt to ranks by cost, compared to consecutive rows on each rank."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks._measure import Figure, Findings, Size, higher, lower, max_abs_diff
from benchmarks._ranks import start_rank
from recd_plugins.data.table_writer import TableWriter
from recd_plugins.interfaces import SessionKeys
from recd_plugins.runtime.launch import launch
from recd_plugins.runtime.machine import available_cores
from recd_plugins.runtime.signals import Interrupts
from recd_plugins.training.result import in_rounds
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job, Trainer

_LONGEST = 2_000
_ITEMS = 20_000
_CANDIDATES, _REQUESTS_OF_USER = 32, 4
# Costs of a candidate, relative to the lookup and projection of one item: fitted to CPU times.
_ROW_COST, _ATTENTION_COST = 7, 0.01
# Steps before the timed steps.
_WARM_UP = 2
#: Steps, pairs of runs, batch size per rank.
_SIZES: dict[Size, tuple[int, int, int]] = {
    "tiny": (4, 1, 64),
    "small": (12, 1, 256),
    "reference": (100, 5, 256),
}
_REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {path}}}
converter: {{use: recd.ikjt}}
pooling:
  - use: recd.target_attention
    features: [history]
    options: {{target: item, layers: 3}}
sharding: [{{use: torchrec.planner, tables: ["t_*"]}}]
model: {{embedding_dim: 128, num_embeddings: {items}, bottom_mlp: [32], top_mlp: [64]}}
training:
  {{batch_size: {rows}, steps: {steps}, ranks: {ranks}, epochs: 2, evaluate: false,
   eps: 1.0e-3}}
"""
_WRAP = (
    "dataset.wrap=[{use: recd.whole_requests, "
    f"options: {{row_cost: {_ROW_COST}, attention_cost: {_ATTENTION_COST}}}}}]"
)
_VARIANTS: dict[str, tuple[str, ...]] = {"even": (), "balanced": (_WRAP,)}


def run(size: Size) -> Findings:
    """Train pairs of runs on 2 and on 4 ranks."""
    steps, pairs, rows = _SIZES[size]
    figures: list[Figure] = []
    for ranks in (2,) if size == "tiny" else (2, 4):
        with tempfile.TemporaryDirectory() as name:
            table, registry = Path(name, "table.parquet"), Path(name, "balance.yaml")
            lengths = _write_table(table, (steps + 2) * rows * ranks)
            text = _REGISTRY.format(path=table, items=_ITEMS, rows=rows, steps=steps, ranks=ranks)
            registry.write_text(text, encoding="utf-8")

            def train(variant: str, registry: Path = registry, ranks: int = ranks) -> list[_OfRank]:
                with session(Job(registry, settings=_VARIANTS[variant])) as run:
                    return launch(_train, ranks, run.job)

            found = in_rounds([*_VARIANTS], pairs, train)
        lengths = lengths.reshape(ranks, steps + 2, -1)[:, _WARM_UP:steps]
        times = [_times(each["even"]) / _times(each["balanced"]) for each in found]
        cores = min(ranks, available_cores()), ranks
        for n, name in enumerate(("step_time", "cpu_time")):
            over = [each[n] for each in times]
            figures.append(higher(f"{name}_even_over_balanced_{ranks}_ranks", over, goal=1.3))
            figures.append(higher(f"{name}_bound_{ranks}_ranks", _bound(lengths, cores[n])))
        apart = max_abs_diff(of_ranks[0][0] for each in found for of_ranks in each.values())
        figures.append(lower(f"loss_max_abs_diff_{ranks}_ranks", apart, "loss", goal=1e-5))
    return Findings(
        f"requests of {_CANDIDATES} candidates, Zipf histories of up to {_LONGEST} items, three "
        f"layers of target attention, batch {rows} per rank, {steps} steps, {pairs} pairs of runs",
        figures,
        notes=[
            "cpu_time: of the busiest rank, which is the step time with a core per rank. bound: "
            "ratio of the costs of the busiest rank, or of the costs per core if these are higher."
        ],
    )


#: Losses of all steps, and the end of each step on the wall clock and in CPU seconds.
_OfRank = tuple[list[float], list[tuple[float, float]]]


class _TimedTrainer(Trainer):
    def _after_step(self, *, is_best: bool = False) -> None:
        vars(self).setdefault("ends", []).append((time.perf_counter(), time.process_time()))
        super()._after_step(is_best=is_best)


def _train(rank: int, world_size: int, job: Job) -> _OfRank:
    start_rank()
    with Interrupts(rank, world_size) as interrupts:
        trainer = _TimedTrainer(rank, world_size, job, interrupts)
        trainer.train()
        return trainer.losses, vars(trainer)["ends"]


def _times(ranks: list[_OfRank]) -> NDArray[np.float64]:
    """Return the mean step time, and the mean CPU time of the busiest rank of each step."""
    seconds = np.diff([ends for _, ends in ranks], axis=1)[:, _WARM_UP:]
    return np.array(seconds.max(axis=0).mean(axis=0))


def _bound(lengths: NDArray[np.int64], cores: int) -> float:
    """Return the ratio of predicted step times for history lengths ``[ranks, steps, requests]``."""
    of_item = 1 + _ATTENTION_COST * _CANDIDATES
    costs = (lengths * of_item + _ROW_COST * _CANDIDATES).sum(axis=2)
    balanced = costs.sum(axis=0) / cores
    return float(np.maximum(costs.max(axis=0), balanced).sum() / balanced.sum())


def _write_table(path: Path, num_rows: int) -> NDArray[np.int64]:
    """Write several requests per user, whose histories are equally long. Return these lengths."""
    draw = np.random.default_rng(0)
    num = -(-num_rows // _CANDIDATES)
    of_users = np.minimum(draw.zipf(1.2, -(-num // _REQUESTS_OF_USER)), _LONGEST)
    lengths = np.repeat(of_users, _REQUESTS_OF_USER)[:num]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    lists = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(draw.integers(0, _ITEMS, offsets[-1]))
    )
    request = np.repeat(np.arange(num), _CANDIDATES)
    item = draw.integers(0, _ITEMS, (len(request), 1)).tolist()
    table = pa.table(
        {
            "session_id": request,
            "ts": np.arange(len(request), dtype=np.float64),
            "label": draw.integers(0, 2, len(request)).astype(np.int8),
            "price": draw.random(len(request), dtype=np.float32),
            "history": lists.take(pa.array(request)),
            "item": pa.array(item, pa.list_(pa.int64())),
        }
    )
    keys = SessionKeys("session_id", "ts")
    with TableWriter(path, table.schema, keys=keys, layout="list_dict") as writer:
        for batch in table.to_batches(max_chunksize=8192):
            writer.write(batch)
    return lengths
