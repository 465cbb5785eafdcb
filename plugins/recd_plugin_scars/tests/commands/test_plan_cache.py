"""`recd plan --cache` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recd_plugins.cli import main
from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.distributions import zipf

REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: table
    sparse: [item_0, seq_0_0]
    generate: {rows: 2048, row_group_rows: 256}
converter: {use: recd.ikjt}
preprocessing:
  - {use: recd.sigrid_hash, features: ["*"], options: {buckets: 2000}}
pooling:
  - {use: recd.mean, features: ["seq_*"]}
model: {embedding_dim: 32, num_embeddings: 2000, bottom_mlp: [16], top_mlp: [16]}
training: {batch_size: 64, ranks: 2, device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    tables = {
        "t_item_0": zipf("t_item_0", 2000, 1.0, 1.0, seed=1),
        "t_seq_0_0": zipf("t_seq_0_0", 2000, 20.0, 1.2, seed=2),
    }
    AccessProfile(tables, "zipf").save(tmp_path / "reads.parquet")
    return tmp_path


def plan(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["plan", "registry.yaml", "--cache", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_caches_from_the_reads_of_the_data(folder: Path) -> None:
    result = plan("--memory", "64KB", "--json", "cache.json")
    assert result.exit_code == 0, result.output
    shown = words(result)
    for part in (
        "128 samples a step (64 rows a rank), rowwise_adagrad",
        "reads of rows: 2,048 rows of registry.yaml",
        "costs, assumed",
        "Caches within 62.5 KiB",
        "the cache ends where the memory is full",
    ):
        assert part in shown
    report = json.loads((folder / "cache.json").read_text())
    tables = report["tables"]
    assert set(tables) == {"t_item_0", "t_seq_0_0"}
    cached = sum(table["cached_bytes"] for table in tables.values())
    assert 64_000 - 132 < cached <= 64_000
    # What converters deduplicate is looked up once.
    assert tables["t_seq_0_0"]["lookups"] < tables["t_item_0"]["lookups"] * 100
    moved = report["bytes_per_step"]
    assert moved["plain"] > moved["coalesced"] > moved["both"]
    assert moved["plain"] > moved["cached"] > moved["both"]
    assert report["limit"] == "memory"
    without = plan("--memory", "64KB", "--json", "without.json", "--no-lookahead")
    assert without.exit_code == 0
    again = json.loads((folder / "without.json").read_text())["bytes_per_step"]
    assert again["both"] > moved["both"]


def test_what_pays_is_cached_where_no_memory_is_named(folder: Path) -> None:
    result = plan("--profile", "reads.parquet", "--steps", "5", "--json", "cache.json")
    assert result.exit_code == 0, result.output
    assert "no further row is read more than once in 5 steps" in words(result)
    report = json.loads((folder / "cache.json").read_text())
    for table in report["tables"].values():
        assert 0 < table["cached_rows"] == table["useful_rows"] < 2000


def test_the_batch_size_is_searched(folder: Path) -> None:
    searched = ("--profile", "reads.parquet", "--batch-size", "auto", "--memory", "8MB")
    result = plan(*searched, "--json", "a.json")
    assert result.exit_code == 0, result.output
    assert "searched" in words(result)
    report = json.loads((folder / "a.json").read_text())
    chosen = report["chosen"]
    used = report["batch_size"] * report["sample_bytes"] + chosen["bytes"]
    assert 8e6 - 2 * report["sample_bytes"] < used <= 8e6
    result = plan(*searched, "--sample-bytes", "1KB", "--largest-batch", "32", "--json", "b.json")
    report = json.loads((folder / "b.json").read_text())
    assert (report["batch_size"], report["sample_bytes"]) == (64, 1000)


def test_a_cache_that_is_smaller_than_a_batch_or_holds_a_table(folder: Path) -> None:
    small = words(plan("--profile", "reads.parquet", "--memory", "8KB"))
    assert "7.8 KiB is less than the" in small
    assert "that the distinct rows of one batch take" in small


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiers"], "--tiers and --cache are two plans"),
        (["--memory", "much"], "'much' is no number of bytes; write 256MB"),
        (["--batch-size", "auto"], "say how much with --memory, as 16GiB"),
        (["--batch-size", "auto", "--memory", "1KB"], "has no room for one sample of each of 2"),
        (["--profile", "none.parquet"], "none.parquet"),
        (["--profile", "other.parquet"], "does not cover table t_item_0; its tables: t_user"),
        (["--profile", "larger.parquet"], "2,001 rows of table t_item_0, the model has 2,000"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    for file, table, rows in (("other", "t_user", 2000), ("larger", "t_item_0", 2001)):
        AccessProfile({table: zipf(table, rows, 1.0, 1.0)}, "x").save(folder / f"{file}.parquet")
    result = plan(*arguments)
    assert result.exit_code != 0
    assert message in words(result)


def test_options_of_the_cache_alone_are_refused(folder: Path) -> None:
    arguments = ["plan", "registry.yaml", "--memory", "1MB", "--no-lookahead"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "--memory and --no-lookahead are for --cache" in result.output
    assert not (folder / "table").exists()
