"""Bytes of delta checkpoints on a Zipf stream, compared to full checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks._dynamic_step import one_rank, sharded, zipf
from benchmarks._measure import Findings, Size, higher
from recd_plugins import Checkpoints
from recd_plugins.training.checkpoint_files import Progress, read_manifest

_ROWS: dict[Size, int] = {"tiny": 6_400, "small": 200_000, "reference": 1_000_000}
_DIM, _BATCH, _ZIPF, _DELTAS = 32, 1024, 1.1, 3
_FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}


def delta_bytes(size: Size) -> Findings:
    """Train a fixed and a dynamic table on the same ids, and save full checkpoints and deltas."""
    rows, steps = _ROWS[size], 10 if size == "tiny" else 100
    figures = []
    for use, prefix in (("torchrec.row_wise", ""), ("dynamic.table", "dynamic_")):
        with one_rank(), tempfile.TemporaryDirectory() as folder:
            over = _full_over_delta(Path(folder), use, rows, steps)
        figures.append(higher(f"{prefix}delta_bytes_reduction", over, goal=6))
    note = (
        f"Checkpoints: one table of {rows:,} rows of {_DIM} floats, row-wise Adagrad, {_BATCH:,} "
        f"ids per step from a Zipf distribution (exponent {_ZIPF}), a delta every {steps} steps."
    )
    return Findings("", figures, notes=[note])


def _full_over_delta(folder: Path, use: str, rows: int, every: int) -> list[float]:
    """Return the bytes of full checkpoints, divided by the bytes of deltas at the same steps."""
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=_DIM, feature_names=["id"]
    )
    dmp = sharded(nn.Sequential(EmbeddingBagCollection([table])), use, _FUSED_PARAMS)
    optimizer = dmp.fused_optimizer
    # Half of the rows, so that a dynamic table evicts no id.
    draw_ids = zipf(np.random.default_rng(0).permutation(rows // 2), _ZIPF)
    lengths = torch.ones(_BATCH, dtype=torch.int64)
    kinds = {name: folder / name for name in ("full", "deltas")}
    for path in kinds.values():
        path.mkdir()
    whole = Checkpoints(kinds["full"], keep=1)
    chain = Checkpoints(kinds["deltas"], keep=1, full_every=_DELTAS + 1)
    chain.load(dmp, optimizer)
    over = []
    for step in range(1, (_DELTAS + 1) * every + 1):
        batch = KeyedJaggedTensor(["id"], draw_ids(_BATCH), lengths=lengths)
        optimizer.zero_grad()
        dmp(batch).values().square().mean().backward()
        optimizer.step()
        if step % every == 0:
            for checkpoints in (whole, chain):
                checkpoints.save(dmp, optimizer, Progress(step))
            over.append(_bytes(whole.of_step(step)) / _bytes(chain.of_step(step)))
    return over[1:]


def _bytes(checkpoint: Path) -> int:
    return sum(each.bytes for each in read_manifest(checkpoint).values())
