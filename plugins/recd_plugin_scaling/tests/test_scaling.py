"""`recd plan --scaling` as a user runs it."""

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


def plan(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["plan", "registry.yaml", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_step_by_the_number_of_ranks(folder: Path) -> None:
    other = REGISTRY.replace("num_embeddings: 500", "num_embeddings: 100000000000")
    (folder / "huge.yaml").write_text(other, encoding="utf-8")
    result = plan(
        *("--scaling", "--topology", "ndv4", "--ranks-per-node", "2", "--nodes", "3"),
        *("--global-batch", "120", "--beside", "huge.yaml", "--json", "p", "--plot", "p.png"),
    )
    assert result.exit_code == 0, result.output
    assert "huge, weak, 2 ranks: no plan fits" in result.stdout
    report = json.loads((folder / "p").read_text())
    assert [each["ranks"] for each in report["weak"]["stock"]] == [2, 4, 6]
    assert [each["batch_size"] for each in report["weak"]["registry"]] == [64] * 3
    assert [each["batch_size"] for each in report["strong"]["registry"]] == [60, 30, 20]
    assert all("no plan fits" in each["problem"] for each in report["strong"]["huge"])
    assert report["other_models"] == ["huge"]
    assert "huge has other features or tables than the first" in result.stdout
    assert "registry has other" not in result.stdout
    assert "no plan fits" in result.stdout.partition("huge, strong, ")[2]
    assert "(of --global-batch 120)" in result.stdout.replace("\n", " ")
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    few = plan("--scaling", "--topology", "ndv4", "--nodes", "2", "--global-batch", "15")
    assert few.exit_code == 2
    assert "--global-batch 15: no row for each of 16 ranks" in few.output
    again = plan("--scaling", "--beside", "registry.yaml")
    assert "there is a line named registry; rename the file" in again.output
