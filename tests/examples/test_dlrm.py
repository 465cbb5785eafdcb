"""The examples criteo, random and trace, smaller, as their READMEs say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tests import forked
from tests.commands import recd

import recd_plugins
from recd_plugins.data.loader import build_dataloader

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands(name: str) -> list[list[str]]:
    text = (EXAMPLES / name / "README.md").read_text()
    return [shlex.split(line, comments=True) for line in re.findall(r"^(recd .*)$", text, re.M)]


def copy(name: str, folder: Path, changes: dict[str, str]) -> None:
    for path in (EXAMPLES / name).glob("*.yaml"):
        shutil.copy(path, folder)
    registry = folder / "registry.yaml"
    text = registry.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    registry.write_text(text)


def compared(folder: Path, command: list[str], steps: int = 8, samples: int = 512) -> Any:
    done = forked.run([forked.RECD, *command[1:], "--json", "out.json"], cwd=folder, check=True)
    assert re.search(rf"losses\s+of\s+(all\s+)?{steps}\s+steps", done.stdout), done.stdout
    report = json.loads((folder / "out.json").read_text())
    assert np.allclose(report["baseline"]["losses"], report["plugins"]["losses"], atol=1e-3)
    for side in ("baseline", "plugins"):
        assert report[side]["test"]["num_samples"] == samples
    return report


def test_random_rows_are_trained_on_and_compared(tmp_path: Path) -> None:
    smaller = {"    rows: 16384": "    rows: 4096", "test_rows: 4096": "test_rows: 512"}
    copy("random", tmp_path, smaller)
    plain, compare, *_ = commands("random")
    assert plain == ["recd", "run", "registry.yaml"]
    compared(tmp_path, compare)
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".yaml", ".json")] == []


def test_traces_are_profiled_drawn_and_trained_on(cwd: Path) -> None:
    copy("trace", cwd, {"    rows: 8192": "    rows: 2048", "test_rows: 2048": "test_rows: 512"})
    profile, plain, compare, generate = commands("trace")
    for command in (profile, generate):
        recd(*command[1:])
    assert plain == ["recd", "run", "registry.yaml"]
    compared(cwd, compare)
    assert (cwd / "rows.parquet").is_file()


def test_criteo_is_trained_and_compared(cwd):
    recd("criteo", "sample", "data", "--rows", "4000")
    copy("criteo", cwd, {})
    report = compared(cwd, ["recd", "run", "registry.yaml", "--compare"], 15, 2_000)
    for side in ("baseline", "plugins"):
        assert report[side]["test"]["auc"] > 0.7


def test_converted_data_and_a_dictionary_fit_the_tables(cwd):
    for command in ("criteo sample data --rows 1000 --format gz", "criteo convert data parquet"):
        recd(*command.split())
    copy("criteo", cwd, {"path: data ": "path: parquet ", ": hashed": ": dictionary"})
    registry = recd_plugins.load_registry("registry.yaml")
    registry.dataset.prepare()
    batches = list(build_dataloader(registry, rank=0, world_size=2, split="train"))
    assert [len(batch.labels) for batch in batches] == [256] * 3
    assert len(batches[0].sparse_features.keys()) == 26
