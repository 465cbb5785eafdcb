"""`recd plan --readers`, and its advice for given measurements."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from recd_plugin_dsi.readers_report import ReaderPlan, Reading, Training, render
from recd_plugins.cli import main
from recd_plugins.interfaces.batch import MakingTimes

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
        (["--stall-target", "0.1"], "--stall-target needs --readers"),
        (["--readers", "--stall-target", "1"], "--stall-target"),
    ],
)
def test_refusals(folder, arguments, word):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert word in " ".join(result.output.split())
    assert not (folder / "table").exists()


def planned(*, making=0.3, reader_cpu=0.0, training=0.1, trainer_cpu=0.1, arrival=0.0, **options):
    times = MakingTimes(fill=making, transfer=arrival, arrival=arrival)
    options = {"target": 0.05, "batch_size": 8, "ranks": 1} | options
    return ReaderPlan(
        Reading(times, reader_cpu, batch_bytes=1000.0),
        Training(training, trainer_cpu, 0.0),
        **{"cores": 2} | options,
    )


def test_readers_that_wait_need_no_cores():
    found = planned()
    assert (found.readers, found.cores_suffice, found.reader_cores) == (3, True, 0.0)
    assert "training.workers: 3" in found.advice()


def test_a_machine_without_cores_for_them():
    """0.3 s of a processor for a batch of 0.1 s of training: three cores, and one is left."""
    found = planned(reader_cpu=0.3)
    assert planned(reader_cpu=0.05).cores_suffice
    assert not planned(reader_cpu=0.05, ranks=2).cores_suffice
    assert (found.readers, found.cores_suffice) == (3, False)
    assert found.reader_cores == pytest.approx(3)
    assert "has only" in found.advice()
    assert "dsi.ray" in found.advice()


def test_no_reader_is_needed_where_reading_is_quick():
    found = planned(making=0.001)
    assert found.readers == 0
    assert "no readers are needed" in found.advice()


def test_unpacking_that_takes_too_long():
    found = planned(making=0.1, arrival=0.05)
    assert found.readers is None
    assert "no number of readers" in found.advice()
    assert found.as_json()["readers"] is None


def test_json_and_table():
    found = planned(reader_cpu=0.3, ranks=2)
    report = found.as_json()
    assert (report["readers_per_rank"], report["readers"]) == (3, 6)
    assert report["reader"]["fill_seconds"] == 0.3
    out = StringIO()
    Console(width=100, file=out).print(render(found))
    assert "* 3" in out.getvalue()
