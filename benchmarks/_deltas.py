"""Bytes of delta checkpoints on a Zipf stream, compared to full checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks._measure import Findings, Size, higher
from benchmarks._ranks import shard, start_rank
from recd_plugin_dynamic.index.policies import LeastRecentlyUsed
from recd_plugin_dynamic.runtime.collection import with_dynamic_tables
from recd_plugin_dynamic.runtime.sharded import DynamicBagsSharder
from recd_plugin_dynamic.table import DynamicTable
from recd_plugins import Checkpoints
from recd_plugins.config import TrainingSpec
from recd_plugins.runtime.launch import launch
from recd_plugins.sharding.sharders import ExactEmbeddingBagCollectionSharder, fused_params
from recd_plugins.training.checkpoint_files import Progress, read_manifest
from recd_plugins.training.optimizer import build_optimizer

_ROWS: dict[Size, int] = {"tiny": 2_000, "small": 200_000, "reference": 1_000_000}
_DIM, _BATCH, _BUCKETS, _ZIPF, _DELTAS = 32, 1024, 8, 1.1, 3
_TRAINING = TrainingSpec()


def delta_bytes(size: Size) -> Findings:
    """Train a fixed and a dynamic table on the same ids, and save full checkpoints and deltas."""
    rows, steps = _ROWS[size], 10 if size == "tiny" else 100
    figures = []
    for kind, prefix in (("fixed", ""), ("dynamic", "dynamic_")):
        full, deltas = launch(_save, 1, kind, rows, steps)[0]
        over = [each / delta for each, delta in zip(full, deltas, strict=True)]
        figures.append(higher(f"{prefix}delta_bytes_reduction", over, goal=6))
    note = (
        f"Checkpoints: one table of {rows:,} rows of {_DIM} floats, row-wise Adagrad, {_BATCH:,} "
        f"ids per step from a Zipf distribution (exponent {_ZIPF}), a delta every {steps} steps."
    )
    return Findings("", figures, notes=[note])


def _save(
    rank: int, world_size: int, kind: str, rows: int, every: int
) -> tuple[list[int], list[int]]:
    """Return the bytes of full checkpoints and of deltas at the same steps."""
    start_rank()
    dmp = _model(kind, rows)
    optimizer = build_optimizer(dmp, _TRAINING)
    draw = np.random.default_rng(0)
    names = draw.permutation(rows // 2)  # half of the rows, so that a dynamic table evicts no id
    chances = np.arange(1, len(names) + 1) ** -_ZIPF
    ends = np.cumsum(chances / chances.sum())
    full, deltas = [], []
    with tempfile.TemporaryDirectory() as folder:
        kinds = {name: Path(folder, name) for name in ("full", "deltas")}
        for path in kinds.values():
            path.mkdir()
        whole = Checkpoints(kinds["full"], keep=1)
        chain = Checkpoints(kinds["deltas"], keep=1, full_every=_DELTAS + 1)
        chain.load(dmp, optimizer)
        for step in range((_DELTAS + 1) * every):
            ids = names[np.searchsorted(ends, draw.random(_BATCH)).clip(max=len(names) - 1)]
            lengths = torch.ones(_BATCH, dtype=torch.int64)
            batch = KeyedJaggedTensor(["id"], torch.from_numpy(ids), lengths=lengths)
            optimizer.zero_grad()
            dmp(batch).values().square().mean().backward()
            optimizer.step()
            if (step + 1) % every == 0:
                for checkpoints in (whole, chain):
                    checkpoints.save(dmp, optimizer, Progress(step + 1))
                full.append(_bytes(whole.of_step(step + 1)))
                deltas.append(_bytes(chain.of_step(step + 1)))
    return full[1:], deltas[1:]


def _bytes(checkpoint: Path) -> int:
    return sum(each.bytes for each in read_manifest(checkpoint).values())


def _model(kind: str, rows: int) -> DistributedModelParallel:
    torch.manual_seed(0)
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=_DIM, feature_names=["id"]
    )
    model: nn.Module = nn.Sequential(EmbeddingBagCollection([table]))
    params = fused_params(_TRAINING)
    sharder: Any = ExactEmbeddingBagCollectionSharder(params)
    if kind == "dynamic":
        layout = DynamicTable(_BUCKETS, rows // _BUCKETS, LeastRecentlyUsed())
        model, sharder = with_dynamic_tables(model, {"t": layout}), DynamicBagsSharder(params)
    return shard(model, "0", {"t": row_wise(compute_kernel="fused")}, sharder, torch.device("cpu"))
