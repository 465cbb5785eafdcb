"""Training with requests dealt to ranks by cost, compared to consecutive rows on each rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._measure import Figure, Findings, Size, higher, lower
from recd_plugins.training.result import Result, in_rounds
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

_LONGEST = 2_000
_ITEMS = 20_000
#: Steps, pairs of runs, batch size per rank.
_SIZES: dict[Size, tuple[int, int, int]] = {
    "tiny": (4, 1, 32),
    "small": (12, 1, 256),
    "reference": (30, 3, 256),
}
_REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {path}}}
  {wrap}
converter: {{use: recd.ikjt}}
pooling:
  - use: recd.target_attention
    features: [history]
    options: {{target: item, layers: 3}}
sharding: [{{use: torchrec.planner, tables: ["t_*"]}}]
model: {{embedding_dim: 64, num_embeddings: {items}, bottom_mlp: [32], top_mlp: [64]}}
training:
  {{batch_size: {rows}, steps: {steps}, epochs: 2, evaluate: false, eps: 1.0e-3}}
"""
_WRAP = "wrap: [{use: recd.whole_requests, options: {row_cost: 1, attention_cost: 0.02}}]"


def run(size: Size) -> Findings:
    """Train pairs of runs on 2 and on 4 ranks."""
    steps, pairs, rows = _SIZES[size]
    figures: list[Figure] = []
    for ranks in (2,) if size == "tiny" else (2, 4):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _write_table(folder / "table.parquet", (steps + 2) * rows * ranks)
            for each, wrap in (("even", ""), ("balanced", _WRAP)):
                text = _REGISTRY.format(
                    path=folder / "table.parquet", wrap=wrap, items=_ITEMS, rows=rows, steps=steps
                )
                (folder / f"{each}.yaml").write_text(text, encoding="utf-8")

            def train(each: str, folder: Path = folder, ranks: int = ranks) -> Result:
                job = Job(folder / f"{each}.yaml", overrides={"ranks": ranks})
                with session(job) as trainer:
                    return trainer.train()

            found = in_rounds(("even", "balanced"), pairs, train)
        speed = [(each["balanced"], each["even"]) for each in found]
        figures.append(
            higher(
                f"balanced_over_even_{ranks}_ranks",
                [(a.samples_per_second or 0) / (b.samples_per_second or 1) for a, b in speed],
                goal=1.3,
            )
        )
        losses = [abs(a - b) for x, y in speed for a, b in zip(x.losses, y.losses, strict=True)]
        figures.append(lower(f"loss_max_abs_diff_{ranks}_ranks", max(losses), "loss", goal=1e-5))
    return Findings(
        f"requests, Zipf histories of up to {_LONGEST} items, three layers of target attention, "
        f"batch {rows} per rank, {steps} steps, {pairs} pair(s) of runs",
        figures,
    )


def _write_table(path: Path, num_rows: int) -> None:
    """Write four requests of 16 candidates per user, whose histories are equally long."""
    candidates, of_user = 16, 4
    draw = np.random.default_rng(0)
    num = -(-num_rows // candidates)
    of_users = np.minimum(draw.zipf(1.2, -(-num // of_user)), _LONGEST)
    lengths = np.repeat(of_users, of_user)[:num]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    lists = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(draw.integers(0, _ITEMS, offsets[-1]))
    )
    request = np.repeat(np.arange(num), candidates)
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
    pq.write_table(table, path, row_group_size=4096)
