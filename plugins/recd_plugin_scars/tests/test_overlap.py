"""Caches that look ahead have a pipeline of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recd_plugin_scars.tests.cache_cases import write_registry
from recd_plugins.api import load_registry
from recd_plugins.sharding.pipeline import LookaheadTrainPipeline
from recd_plugins.training.sharded_model import build_sharded_model

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("lookahead", [True, False])
def test_cached_tables_do_not_overlap(table: Path, tmp_path: Path, lookahead: bool) -> None:
    training = {"ranks": 1, "overlap": True}
    options = {"rows": 100, "lookahead": lookahead}
    row_wise = [{"use": "torchrec.row_wise", "tables": ["*"]}]
    path = tmp_path / "registry.yaml"
    write_registry(path, table, options, training=training, sharding=row_wise)
    parts = build_sharded_model(load_registry(path), "plugins", CPU)
    pipeline = parts.prepared.train_pipeline(parts.dmp, parts.optimizer, CPU)
    assert isinstance(pipeline, LookaheadTrainPipeline) == lookahead
