"""`recd plan --readers`, and its advice for given measurements."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.commands import recd, refusal
from tests.small_registry import hashed, papercal, write_registry

from recd_plugin_dsi.readers_report import ReaderPlan, Reading, Training, render
from recd_plugins.interfaces.batch import MakingTimes


@pytest.fixture
def folder(cwd: Path) -> Path:
    write_registry(
        cwd,
        dataset=papercal(cwd, 2048, 256, sparse=["item_0"]),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(2000),
        model={"embedding_dim": 8, "num_embeddings": 2000},
        training={"batch_size": 64, "ranks": 2},
    )
    return cwd


def test_measures_and_plans(folder):
    arguments = ["--readers", "--stall-target", "0.1", "--json", "plan.json"]
    said = recd("plan", "registry.yaml", *arguments)
    report = json.loads((folder / "plan.json").read_text())
    assert report["stall_target"] == 0.1
    assert report["ranks"] == 2
    reader = report["reader"]
    parts = [reader[f"{part}_seconds"] for part in ("fill", "convert", "preprocess", "transfer")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(reader["batch_seconds"] + reader["arrival_seconds"], rel=0.5)
    assert reader["batch_bytes"] > 64 * 8
    assert report["trainer"]["seconds"] > 0
    assert report["advice"] in " ".join(said.split())


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
    assert word in refusal("plan", "registry.yaml", *arguments, code=2)
    assert not (folder / "table").exists()


def planned(*, making=0.3, reader_cpu=0.0, training=0.1, trainer_cpu=0.1, arrival=0.0, **options):
    times = MakingTimes(fill=making, transfer=arrival, arrival=arrival)
    options = {"target": 0.05, "batch_size": 8, "ranks": 1} | options
    reading = Reading(times, reader_cpu, batch_bytes=1000.0)
    return ReaderPlan(reading, Training(training, trainer_cpu, 0.0), **{"cores": 2} | options)


@pytest.mark.parametrize(
    ("times", "readers", "advice"),
    [
        ({}, 3, "training.workers: 3"),  # readers that wait need no cores
        ({"making": 0.001}, 0, "no readers are needed"),
        ({"making": 0.1, "arrival": 0.05}, None, "no number of readers"),
    ],
)
def test_the_number_of_readers_is_advised(times, readers, advice):
    found = planned(**times)
    assert found.readers == found.as_json()["readers"] == readers
    assert advice in found.advice()
    if not times:
        assert (found.cores_suffice, found.reader_cores) == (True, 0.0)


def test_a_machine_without_cores_for_them():
    # 0.3 s of a processor for a batch of 0.1 s of training: three cores, and one is left.
    found = planned(reader_cpu=0.3)
    assert planned(reader_cpu=0.05).cores_suffice
    assert not planned(reader_cpu=0.05, ranks=2).cores_suffice
    assert (found.readers, found.cores_suffice) == (3, False)
    assert found.reader_cores == pytest.approx(3)
    assert "has only" in found.advice()
    assert "dsi.ray" in found.advice()


def test_json_and_table():
    found = planned(reader_cpu=0.3, ranks=2)
    report = found.as_json()
    assert (report["readers_per_rank"], report["readers"]) == (3, 6)
    assert report["reader"]["fill_seconds"] == 0.3
    out = StringIO()
    Console(width=100, file=out).print(render(found))
    assert "* 3" in out.getvalue()
