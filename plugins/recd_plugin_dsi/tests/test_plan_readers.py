"""`recd plan --readers` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recd_plugins.cli import main

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options: {path: table, sparse: [item_0], generate: {rows: 2048, row_group_rows: 256}}
converter: {use: recd.ikjt}
preprocessing:
  - {use: recd.sigrid_hash, features: ["*"], options: {buckets: 2000}}
model: {embedding_dim: 8, num_embeddings: 2000, bottom_mlp: [8], top_mlp: [8]}
training: {batch_size: 64, ranks: 2, device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    return tmp_path


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "registry.yaml", *arguments])


def test_measures_and_plans(folder):
    result = plan("--readers", "--stall-target", "0.1", "--json", "plan.json")
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "plan.json").read_text())
    assert report["stall_target"] == 0.1
    assert report["ranks"] == 2
    reader = report["reader"]
    parts = [reader[f"{part}_seconds"] for part in ("fill", "convert", "preprocess", "transfer")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(reader["batch_seconds"] + reader["arrival_seconds"], rel=0.5)
    assert reader["batch_bytes"] > 64 * 8
    assert report["trainer"]["seconds"] > 0
    assert report["advice"] in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--readers", "--topology", "dgx-h100"], "--topology"),
        (["--readers", "--batch-size", "auto"], "--batch-size auto"),
        (["--stall-target", "0.1"], "--stall-target is for --readers"),
        (["--readers", "--stall-target", "1"], "--stall-target"),
    ],
)
def test_refusals(folder, arguments, word):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert word in " ".join(result.output.split())
    assert not (folder / "table").exists()
