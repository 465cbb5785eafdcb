"""A small registry in a folder of its own, and commands on it in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recd_plugins.cli import main

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: table
    sparse: [item_0, usr_0, "seq_0_*"]
    generate: {rows: 1024, row_group_rows: 256}
converter: {use: recd.ikjt}
preprocessing:
  - {use: recd.sigrid_hash, features: ["*"], options: {buckets: 500}}
pooling:
  - {use: recd.mean, features: ["seq_*"]}
model: {embedding_dim: 8, num_embeddings: 500, bottom_mlp: [16], top_mlp: [16]}
training: {batch_size: 64, ranks: 2, device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    return tmp_path


def invoked(command: str, *arguments: str) -> Result:
    """What ``recd COMMAND registry.yaml ...`` came to; no exception that it does not handle."""
    result = CliRunner().invoke(main, [command, "registry.yaml", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def plan(*arguments: str) -> Result:
    return invoked("plan", *arguments)
