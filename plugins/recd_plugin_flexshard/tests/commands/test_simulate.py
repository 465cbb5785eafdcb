"""`recd simulate` as a user runs it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from tests.cli.plan_cases import invoked

from recd_plugins.interfaces.access import AccessProfile, TableAccess

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
  - {use: recd.sigrid_hash, features: ["*"], options: {buckets: 2000}}
pooling:
  - {use: recd.mean, features: ["seq_*"]}
sharding:
  - {use: flexshard.three_tier, tables: ["t_seq_*"]}
model: {embedding_dim: 8, num_embeddings: 2000, bottom_mlp: [16], top_mlp: [16]}
training: {batch_size: 32, ranks: 2, device: cpu}
"""
TOPOLOGY = ["--topology", "zionex-a100-40g", "--nodes", "2", "--ranks-per-node", "4"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    return tmp_path


def simulate(*arguments: str) -> Result:
    return invoked("simulate", *arguments)


def test_drawn_batches(folder: Path) -> None:
    result = simulate(*TOPOLOGY, "--batch-size", "64", "--steps", "2", "--json", "s.json")
    assert result.exit_code == 0, result.output
    assert "sharding[0], three_tier: 3 tables, 2 steps of 64 rows" in result.stdout
    report = json.loads((folder / "s.json").read_text())
    assert report["topology"]["world_size"] == 8
    entry = report["entries"]["sharding[0]"]
    assert entry["tiered"]["tiers"].keys() == {"cold", "hot", "flex", "flex_gradients"}
    reduction = entry["a2a_reduction"]
    assert reduction["simulated"] == pytest.approx(reduction["predicted"], abs=0.03)


def test_real_batches(folder: Path) -> None:
    result = simulate(*TOPOLOGY, "--data", "--steps", "2", "--json", "s.json")
    assert result.exit_code == 0, result.output
    assert "batches of registry.yaml" in " ".join(result.stdout.split())
    entry = json.loads((folder / "s.json").read_text())["entries"]["sharding[0]"]
    # Deduplicated rows are not looked up twice.
    assert entry["tiered"]["lookups"]["mean"] < entry["row_wise"]["lookups"]["mean"] / 2
    assert "2 batches of 32 rows for each" not in result.output
    assert "play fewer steps" in simulate(*TOPOLOGY, "--data", "--steps", "9").output


def test_accesses_that_have_changed(folder: Path) -> None:
    tables = {
        name: TableAccess.from_counts(
            name, (name[2:],), 2000, samples=1, rows=np.arange(2000), accesses=np.full(2000, 0.1)
        )
        for name in ("t_seq_0_0", "t_seq_0_1", "t_seq_0_2")
    }
    AccessProfile(tables, "flat").save(folder / "p.parquet")
    result = simulate(*TOPOLOGY, "--profile", "p.parquet", "--json", "s.json")
    assert result.exit_code == 0, result.output
    reduction = json.loads((folder / "s.json").read_text())["entries"]["sharding[0]"]
    assert reduction["a2a_reduction"]["simulated"] < reduction["a2a_reduction"]["predicted"] - 0.01
    lists = (folder / "s.json").read_text()
    more = {name: replace(table, features=(*table.features, "x")) for name, table in tables.items()}
    AccessProfile(more, "flat").save(folder / "p.parquet")
    assert simulate(*TOPOLOGY, "--profile", "p.parquet", "--json", "s.json").exit_code == 0
    assert (folder / "s.json").read_text() == lists, "the model has no feature x"
    AccessProfile({"t_seq_0_0": tables["t_seq_0_0"]}, "one").save(folder / "p.parquet")
    assert "does not cover table" in simulate(*TOPOLOGY, "--profile", "p.parquet").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "--profile", "p"], "--data plays real batches"),
        (["--topology", "dgx-h10"], "did you mean dgx-h100?"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_the_example_of_the_page_runs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    (line,) = re.findall(r"^\$ recd simulate registry.yaml (.*)$", page, re.M)
    result = simulate(*line.split())
    assert result.exit_code == 0, result.output
    assert (folder / "played.json").is_file()
