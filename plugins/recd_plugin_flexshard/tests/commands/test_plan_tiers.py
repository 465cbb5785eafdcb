"""`recd plan --tiers` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recd_plugin_flexshard.table_plan import memory_of
from recd_plugins.cli import main
from recd_plugins.planning.plan_mode import measurement
from recd_plugins.planning.topologies import read_topology

SHARDING = """
sharding:
  - {use: flexshard.three_tier, tables: ["t_seq_*"]}
"""
REGISTRY = f"""
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: table
    sparse: [item_0, "seq_0_*"]
    generate: {{rows: 1024, row_group_rows: 256}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 2000}}}}
pooling:
  - {{use: recd.mean, features: ["seq_*"]}}
{SHARDING}
model: {{embedding_dim: 32, num_embeddings: 2000, bottom_mlp: [16], top_mlp: [16]}}
training: {{batch_size: 64, ranks: 2, ranks_per_node: 1, device: cpu}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    return tmp_path


def plan(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["plan", "registry.yaml", "--tiers", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_tiers_for_a_cluster(folder: Path) -> None:
    result = plan(
        *("--topology", "zionex-a100-40g", "--batch-size", "128", "--overlap", "0.5"),
        *("--json", "tiers.json"),
    )
    assert result.exit_code == 0, result.output
    shown = words(result)
    for part in ("32 ranks on cuda", "128 rows a rank; collectives: of the topology", "t_seq_0_0"):
        assert part in shown
    assert "sharding[0] flexshard.three_tier: M = 6, c = 1, least time" in shown
    assert "exposed at 50% overlap" in shown
    report = json.loads((folder / "tiers.json").read_text())
    assert report["batch_size"] == 128
    assert report["what_if"] == {"overlap": 0.5}
    (entry,) = report["entries"]
    assert (entry["plugin"], entry["strategy"]) == ("flexshard.three_tier", "three_tier")
    assert all(table["rows"] == 2000 for table in entry["tables"])


@pytest.mark.skipif(measurement() is None, reason="nothing that is there measures machines")
def test_this_machine_is_measured_and_then_planned_with(folder: Path) -> None:
    result = plan("--calibrate", "here.yaml")
    assert result.exit_code == 0, result.output
    assert "2 nodes of machine: 2 ranks on cpu" in words(result)
    measured = read_topology(folder / "here.yaml")
    assert (measured.nodes, measured.ranks_per_node) == (2, 1)
    assert measured.collectives is not None
    memory = memory_of(measured)
    assert memory is not None
    # A copy with its optimizer state and what finds it, and at most two of its size in a step.
    assert 1.25 < memory.memory_multiplier < 3
    assert 0 < memory.saved_activations < 2
    again = words(plan("--topology", "here.yaml"))
    assert "M and c: measured" in again
    assert f"M = {memory.multiplier(2):.3g}, c = " in again
    refused = plan("--calibrate", "here.yaml")
    assert refused.exit_code == 1
    assert "here.yaml exists already" in words(refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--batch-size", "auto"],
            "--tiers are chosen for a number of rows: leave out --batch-size auto",
        ),
        (["--budget", "0"], "0.0 is not in the range x>0"),
        (["--overlap", "1.5"], "1.5 is not in the range 0<=x<=1"),
        (["--plot", "tiers.png"], "--plot: there is no picture of --tiers"),
        (["--nodes", "1"], "registry.yaml:16 sharding[0]: three tiers need several nodes"),
        (["--budget", "0.01"], "registry.yaml:16 sharding[0]: the tables take at least"),
        (
            ["--calibrate", "a.yaml", "--topology", "dgx-h100", "--nodes", "2"],
            "measuring 16 ranks needs as many CUDA devices on this machine",
        ),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    result = plan(*arguments)
    assert result.exit_code != 0
    assert message in words(result)
    assert not (folder / "a.yaml").exists()


def test_without_an_entry_that_has_tiers(folder: Path) -> None:
    (folder / "registry.yaml").write_text(REGISTRY.replace(SHARDING, ""), encoding="utf-8")
    result = plan()
    assert result.exit_code == 1
    shown = words(result)
    assert "add an entry to the section sharding that uses flexshard.two_tier" in shown
