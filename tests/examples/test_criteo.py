"""The Criteo example, on a small sample."""

from __future__ import annotations

import json
import re
from pathlib import Path

from click.testing import CliRunner
from tests import forked

import recd_plugins
from recd_plugins.cli import main
from recd_plugins.data.loader import build_dataloader

EXAMPLE = Path(__file__).parents[2] / "examples" / "criteo"


def test_it_is_trained_and_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sampled = CliRunner().invoke(main, ["criteo", "sample", "data", "--rows", "4000"])
    assert sampled.exit_code == 0, sampled.output
    command = [
        forked.RECD,
        "run",
        str(EXAMPLE / "registry.yaml"),
        "--compare",
        "--json",
        "out.json",
    ]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    assert re.search(r"losses\s+of\s+(all\s+)?15\s+steps", done.stdout), done.stdout
    report = json.loads(Path("out.json").read_text())
    for side in ("baseline", "plugins"):
        assert report[side]["test"]["num_samples"] == 2_000
        assert report[side]["test"]["auc"] > 0.7


def test_converted_data_and_a_dictionary_fit_the_tables(tmp_path, monkeypatch):
    """What README.md says to change."""
    monkeypatch.chdir(tmp_path)
    for command in ("criteo sample data --rows 1000 --format gz", "criteo convert data parquet"):
        assert CliRunner().invoke(main, command.split()).exit_code == 0
    text = (EXAMPLE / "registry.yaml").read_text()
    for before, after in (("path: data ", "path: parquet "), (": hashed", ": dictionary")):
        assert before in text
        text = text.replace(before, after)
    Path("registry.yaml").write_text(text)
    registry = recd_plugins.load_registry("registry.yaml")
    registry.dataset.prepare()
    batches = list(build_dataloader(registry, rank=0, world_size=2, split="train"))
    assert [len(batch.labels) for batch in batches] == [256] * 3
    assert len(batches[0].sparse_features.keys()) == 26
