from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import invoke, recd
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins.interfaces.access import AccessProfile
from recd_plugins.interfaces.distributions import zipf


@pytest.fixture
def folder(cwd: Path) -> Path:
    write_registry(
        cwd,
        dataset=papercal(cwd, 2048, 256, sparse=["item_0", "seq_0_0"]),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(2000),
        pooling=[{"use": "recd.mean", "features": ["seq_*"]}],
        model={"embedding_dim": 32, "num_embeddings": 2000},
        training={"batch_size": 64, "ranks": 2},
    )
    return cwd


PLAN = ["plan", "registry.yaml", "--cache"]


def plan(*arguments: str) -> str:
    return " ".join(recd(*PLAN, *arguments).split())


def test_caches_from_the_reads_of_the_data(folder: Path) -> None:
    shown = plan("--memory", "64KB", "--json", "cache.json")
    for part in (
        "128 samples per step (64 rows per rank), rowwise_adagrad",
        "reads of rows: 2,048 rows of registry.yaml",
        "Caches within 62.5 KiB",
        "the cache ends where the memory is full",
        "but --memory is 62.5 KiB. Use smaller batches",
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
    assert moved["plain"] > moved["coalesced"] > moved["cached"]
    assert report["limit"] == "memory"


def test_useful_rows_are_cached_where_no_memory_is_named(folder: Path) -> None:
    steep = {name: zipf(name, 2000, 1.0, 3.0) for name in ("t_item_0", "t_seq_0_0")}
    AccessProfile(steep, "zipf").save(folder / "reads.parquet")
    shown = plan("--profile", "reads.parquet", "--json", "cache.json")
    assert "no further row is read more than once in 10,000 steps" in shown
    report = json.loads((folder / "cache.json").read_text())
    assert all(0 < table["cached_rows"] < 2000 for table in report["tables"].values())


def test_rows_and_batch_share_memory(folder: Path) -> None:
    # The largest batch of 131,072 samples leaves 91 KB for rows.
    options = ["--batch-size", "auto", "--memory", "67.2MB", "--sample-bytes", "512B"]
    shown = plan(*options, "--json", "cache.json")
    assert "a smaller batch would cost more than further rows save (512 B per sample)" in shown
    report = json.loads((folder / "cache.json").read_text())
    cached = sum(table["cached_bytes"] for table in report["tables"].values())
    assert 91_136 - 132 < cached <= 91_136
    assert report["batch_size"] == 131_072


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiers"], "--tiers and --cache cannot be combined"),
        (["--memory", "much"], "'much' is not a positive number of bytes"),
        (["--batch-size", "auto"], "Set --memory"),
        (["--profile", "none.parquet"], "none.parquet"),
        (["--profile", "other.parquet"], "does not contain table 't_item_0', only: 't_user"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    AccessProfile({"t_user": zipf("t_user", 9, 1.0, 1.0)}, "x").save(folder / "other.parquet")
    result = invoke(*PLAN, *arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
