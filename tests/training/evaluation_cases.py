"""Evaluation of tables whose rows do not fill batches, for processes of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from recd_plugins import load_registry
from recd_plugins.compat.lookup_kernels import step_counts
from recd_plugins.training.assembly import assemble
from recd_plugins.training.checkpoint import FiniteRun
from recd_plugins.training.evaluation import evaluate, steps

SESSIONS = """
from recd_plugins.api import Metric, hookimpl

class Sessions(Metric):
    "Sessions and their rows."
    name = "acme.sessions"

    def start(self):
        return []

    def update(self, state, batch):
        return state + batch.sessions.tolist()

    def results(self, states):
        seen = [each for state in states for each in state]
        return {"rows": len(seen), "sessions": len(set(seen))}

@hookimpl
def register_plugins():
    return [Sessions]
"""

REGISTRY = """
version: 1
dataset: {{use: recd.session_parquet, options: {{path: {folder}/train, test_path: {test}}}}}
converter: {{use: {converter}}}
pooling: [{{use: recd.mean, features: [tags]}}]
model: {{embedding_dim: 8, num_embeddings: 100, bottom_mlp: [8], top_mlp: [1]}}
metrics: [{{use: acme.sessions}}]
training: {{batch_size: 8, workers: {workers}, device: cpu}}
"""


def write_table(path: Path, num_rows: int) -> None:
    """Sessions of three rows, named by words, whose rows have the same ``tags``."""
    rows = range(num_rows)
    table = {
        "session_id": pa.array([f"s{row // 3}" for row in rows]),
        "ts": pa.array(rows, pa.int64()),
        "label": pa.array([row * 7 % 5 % 2 for row in rows], pa.int8()),
        "number": pa.array([row % 6 + row / 64 for row in rows], pa.float32()),
        "item": pa.array([[row % 100] for row in rows], pa.list_(pa.int64())),
        "tags": pa.array([[row // 3 % 20, 7] for row in rows], pa.list_(pa.int64())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path, row_group_size=20)


def evaluated(
    rank: int, world_size: int, folder: Path, cases: Sequence[str]
) -> list[dict[str, Any]]:
    """Of each registry what ``evaluate`` finds, and logits and labels read by another way."""
    found = []
    device = torch.device("cpu")
    for case in cases:
        registry = load_registry(folder / f"{case}.yaml", plugins_dir=folder / "plugins")
        parts = assemble(registry, "plugins", device)
        prepared, dmp = parts.prepared, parts.dmp
        # Every rank reads everything, in batches that the rows fill, before a pipeline takes over.
        ones = prepared.with_training({"batch_size": 5, "workers": 0})
        logits, labels = [], []
        with torch.no_grad(), ones.dataloader(rank=0, world_size=1, split="test") as batches:
            for batch in batches:
                _, (_, of_batch, their_labels) = dmp(batch)
                logits.append(of_batch)
                labels.append(their_labels)
        pipeline = prepared.train_pipeline(dmp, parts.optimizer, device)
        finite = FiniteRun(case)
        quality, metrics = evaluate(prepared, dmp, pipeline, rank, world_size, device, finite)
        assert quality is not None
        pair = torch.cat(logits), torch.cat(labels)
        found.append({**asdict(quality), **metrics, "pair": pair})
    return found


def counted(rank: int, world_size: int, folder: Path, case: str) -> tuple[list[int], list[int]]:
    """Steps that kernels have counted after two steps, and after an evaluation.

    They count each lookup, as FBGEMM's do on CUDA.
    """
    registry = load_registry(folder / f"{case}.yaml", plugins_dir=folder / "plugins")
    device = torch.device("cpu")
    parts = assemble(registry, "plugins", device)
    prepared, dmp = parts.prepared, parts.dmp
    counts: list[Tensor] = []
    for module in dmp.modules():
        for part in chain.from_iterable(each.modules() for each in getattr(module, "_lookups", ())):
            if own := step_counts([getattr(part, "emb_module", nn.Module())]):
                counts += own
                part.register_forward_hook(partial(_count, own))
    pipeline = prepared.train_pipeline(dmp, parts.optimizer, device)
    with prepared.dataloader(rank=rank, world_size=world_size) as loader:
        batches = islice(loader, 2)
        assert len(list(steps(pipeline, batches, registry, dmp.module))) == 2
    before = [int(count) for count in counts]
    evaluate(prepared, dmp, pipeline, rank, world_size, device, FiniteRun(case))
    return before, [int(count) for count in counts]


def _count(counts: list[Tensor], *_: object) -> None:
    for count in counts:
        count.add_(1)
