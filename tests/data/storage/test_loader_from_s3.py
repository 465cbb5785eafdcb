"""What a model gets from a table in a store is what it gets from the same table on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.data.storage.counted_store import Store

from recd_plugins import load_registry
from recd_plugins.data.loader import build_dataloader

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {path}
    dense: [price]
    where:
      - [hour, ">=", 1]
      - [price, "<", 200]
    {storage}
converter: {{use: recd.ikjt, options: {{groups: [[seen, liked]]}}}}
preprocessing:
  - {{use: recd.sigrid_hash, features: [seen, liked], options: {{buckets: 100}}}}
model: {{embedding_dim: 4}}
training: {{batch_size: 16, ranks: 2, workers: {workers}}}
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_both_are_equal_on_every_rank(
    folder: Path, store: Store, tmp_path: Path, workers: int
) -> None:
    found = {}
    reach = f'storage: {{endpoint: "{store.endpoint}", region: us-east-1}}'
    for name, path, storage, its_workers in (
        ("disk", str(folder), "", 0),
        ("s3", "s3://tables/clicks", reach, workers),
    ):
        file = tmp_path / f"{name}.yaml"
        file.write_text(REGISTRY.format(path=path, storage=storage, workers=its_workers))
        registry = load_registry(file)
        registry.dataset.prepare()
        for rank in range(2):
            loader = build_dataloader(registry, rank=rank, world_size=2, device=torch.device("cpu"))
            found[name, rank] = list(loader)
    for rank in range(2):
        pairs = list(zip(found["disk", rank], found["s3", rank], strict=True))
        assert len(pairs) == 175 // 32
        for mine, theirs in pairs:
            assert torch.equal(mine.dense_features, theirs.dense_features)
            assert torch.equal(mine.labels, theirs.labels)
            assert torch.equal(mine.sparse_features.values(), theirs.sparse_features.values())
            assert torch.equal(mine.sparse_features.lengths(), theirs.sparse_features.lengths())
