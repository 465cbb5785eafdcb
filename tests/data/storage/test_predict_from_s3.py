"""Columns that predictions keep come from a store that is reached as the dataset says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.data.storage.counted_store import Store

from recd_plugin_runs.predict import PredictJob
from recd_plugins.runtime.errors import DataError

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {{path: {folder}, storage: {{endpoint: "{endpoint}", region: us-east-1, attempts: 1}}}}
converter: {{use: recd.ikjt}}
model: {{embedding_dim: 4}}
training: {{batch_size: 16}}
"""


def test_kept_columns_are_reached_as_the_dataset_is(
    folder: Path, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(REGISTRY.format(folder=folder, endpoint=store.endpoint), encoding="utf-8")
    job = PredictJob(path, tmp_path / "step-1", table="s3://tables/clicks", keep=("price",))
    job.prepare()
    kept = job.kept(job.load().dataset.to_score(job.table))
    assert kept is not None
    assert kept.take(np.arange(3))["price"].to_pylist() == [0, 1, 2]
    job = PredictJob(path, tmp_path / "step-1", table=job.table, keep=("prize",))
    with pytest.raises(DataError, match="no column prize, which --keep names"):
        job.prepare()
