"""Batches for a CUDA device are pinned as they are handed out, so that copies can overlap."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recd_plugins import load_registry
from recd_plugins.data.loader import DataLoader, build_dataloader
from recd_plugins.interfaces.batch import ModelInput


@pytest.fixture
def loader_for(tmp_path: Path):
    rows = range(32)
    columns = {
        "session_id": pa.array([row // 4 for row in rows], pa.int64()),
        "ts": pa.array(rows, pa.int64()),
        "label": pa.array([row % 2 for row in rows], pa.int8()),
        "seen": pa.array([[row // 4, 1] for row in rows], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    path = tmp_path / "registry.yaml"
    path.write_text(
        "version: 1\n"
        f"dataset: {{use: recd.session_parquet, options: {{path: {tmp_path / 't.parquet'}}}}}\n"
        "converter: {use: recd.ikjt}\n"
        "model: {embedding_dim: 4}\n"
        "training: {batch_size: 8}\n"
    )

    def loader_for(device: str) -> DataLoader:
        registry = load_registry(path)
        return build_dataloader(registry, rank=0, world_size=1, device=torch.device(device))

    return loader_for


@pytest.mark.parametrize(("device", "pinned"), [("cpu", 0), ("cuda", 4)])
def test_batches_are_pinned_for_cuda_only(loader_for, monkeypatch, device, pinned):
    calls = []

    def pin_memory(self):
        calls.append(self)
        return self

    monkeypatch.setattr(ModelInput, "pin_memory", pin_memory)
    assert len(list(loader_for(device))) == 4
    assert len(calls) == pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_batch_is_pinned(loader_for):
    batch = next(iter(loader_for("cuda")))
    assert batch.labels.is_pinned()
    assert batch.sparse_features.values().is_pinned()
    assert batch.sparse_features.inverse_indices()[1].is_pinned()
