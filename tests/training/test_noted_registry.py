"""What a run notes of its registry: the file that it began with, and what was set besides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugins import load_registry
from recd_plugins.cli import main
from recd_plugins.errors import RegistryError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job, train

REGISTRY = """version: 1
dataset: {{use: {dataset}, options: {{rows: 64, test_rows: 0, sparse: {{user: 90}}}}}}
converter: {{use: recd.kjt}}
callbacks: [{{use: trackers.jsonl, options: {{path: {folder}/run.jsonl}}}}]
sharding: [{{use: torchrec.table_wise, tables: ["*"]}}]
model: {{embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 16, ranks: 1, steps: 3, device: cpu}}
"""
PLUGIN = """
from pathlib import Path
from recd_plugin_dlrm.random_rows import Random
from recd_plugins.api import hookimpl

class Edited(Random):
    '''Random rows, while somebody edits the registry.'''

    name = "acme.edited"

    def prepare(self):
        super().prepare()
        path = Path("registry.yaml")
        path.write_text(path.read_text().replace("steps: 3", "steps: 5"))

@hookimpl
def register_datasets():
    return [Edited]
"""


def write(folder: Path, dataset: str = "dlrm.random") -> Path:
    path = folder / "registry.yaml"
    path.write_text(REGISTRY.format(dataset=dataset, folder=folder), encoding="utf-8")
    return path


def test_ranks_have_what_the_run_began_with(tmp_path: Path) -> None:
    path = write(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("steps: 3", "steps: 5"))
    (result,) = run_on_ranks(train, 1, Job(path, text=text))
    assert len(result.losses) == 3
    first, *_ = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert first["registry"] == text


def test_a_session_and_its_report_keep_it_while_data_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plugins").mkdir()
    Path("plugins/acme.py").write_text(PLUGIN, encoding="utf-8")
    path = write(tmp_path, "acme.edited")
    text = path.read_text()
    with session(path, plugins_dir=Path("plugins"), overrides={}) as trainer:
        assert "steps: 5" in path.read_text()
        assert trainer.job.load().training.steps == 3
    path.write_text(text)
    command = ["--plugins-dir", "plugins", "run", "registry.yaml", "--dry-run", "--json", "f.json"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert json.loads(Path("f.json").read_text())["registry"] == text


def test_what_is_wrong_with_it_is_told_by_its_lines(tmp_path: Path) -> None:
    path = write(tmp_path)
    text = path.read_text()
    path.write_text("\n\n\n" + text)
    with pytest.raises(RegistryError, match=r"registry.yaml:7 training.batch_size: "):
        load_registry(path, text=text.replace("batch_size: 16", "batch_size: 0"))


def test_another_sharding_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path)
    run_on_ranks(train, 1, Job(path, overrides={"steps": 1}, sharding="torchrec.row_wise"))
    first, *_ = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert first["settings"] == ["training.steps=1", "--sharding torchrec.row_wise"]
    report = tmp_path / "f.json"
    command = ["run", str(path), "--dry-run", "--sharding", "torchrec.row_wise"]
    done = CliRunner().invoke(main, [*command, "--json", str(report)])
    assert done.exit_code == 0, done.output
    assert json.loads(report.read_text())["settings"] == ["--sharding torchrec.row_wise"]
