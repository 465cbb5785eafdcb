"""`recd run` shows what the trainer waits for data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import forked
from tests.forked import RECD

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {path: table, sparse: [item_0], generate: {rows: 2048, row_group_rows: 256}}
converter: {use: recd.ikjt}
model: {embedding_dim: 8, num_embeddings: 2000, bottom_mlp: [8], top_mlp: [8]}
preprocessing:
  - {use: test.slow, features: [item_0]}
training: {batch_size: 64, ranks: 1, device: cpu, steps: 14, evaluate: false}
"""
SLOW = '''
import time

from recd_plugins.config.hookspecs import hookimpl
from recd_plugins.interfaces import Preprocessing


class Slow(Preprocessing):
    """Takes its time."""

    name = "test.slow"

    def transform(self, values, offsets):
        time.sleep(0.2)
        return values % 2000, offsets


@hookimpl
def register_preprocessing():
    return [Slow]
'''


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cause_is_named(tmp_path: Path, workers: int) -> None:
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "slow.py").write_text(SLOW, encoding="utf-8")
    options = ["--json", "report.json", "--workers", str(workers)]
    done = forked.run(
        [RECD, "--plugins-dir", "plugins", "run", "registry.yaml", *options],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["stalls"]
    assert found["worst"]["rank"] == 0
    # 14 steps: 5 are left out, and 2 take no batch.
    assert found["steps"] == 7
    shares = found["shares"]
    assert max(shares, key=lambda cause: shares[cause]) == "preprocess"
    (rank,) = found["ranks"]
    assert rank["making"]["preprocess"] >= 0.2
    assert (rank["making"]["arrival"] > 0) == (workers > 0)
    assert found["share"] == pytest.approx(sum(rank["seconds"].values()) / rank["step_seconds"])
    words = " ".join(done.stdout.split())
    assert "waiting for data, share of a step" in words
    assert "most for preprocess" in words
