"""``recd init``: a registry file that is valid, complete and never overwritten."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from recd_plugin_recd.models import ModelName, rm_registry
from recd_plugins import load_registry
from recd_plugins.cli import main
from recd_plugins.config.built_in_kinds import KINDS
from recd_plugins.config.schema import registry_spec

MODELS = ("papercal", "rm1", "rm2", "rm3")
DOCS = Path(__file__).parents[4] / "docs"


def init(*arguments: object):
    return CliRunner().invoke(main, ["init", *map(str, arguments)])


def registry_of(path: Path, name: ModelName, **arguments: Any):
    path.write_text(rm_registry(name, folder=path.parent, rows=640, **arguments), encoding="utf-8")
    return load_registry(path)


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_valid_and_has_every_section(tmp_path, name):
    path = tmp_path / "new" / "registry.yaml"
    result = init(name, path)
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(main, ["validate", str(path)]).exit_code == 0
    text = path.read_text(encoding="utf-8")
    document = YAML(typ="safe").load(text)
    # Trainers do by themselves what these would.
    optional = ("ingestion", "optimizers", "metrics", "pipeline", "callbacks")
    sections = [name for name in registry_spec(KINDS).model_fields if name not in optional]
    assert list(document) == sections
    for section in ("dataset", "converter", "preprocessing", "pooling", "sharding", "model"):
        assert re.search(rf"^# [^\n]*\n{section}:", text, re.MULTILINE), f"{section}: no comment"
    assert max(map(len, text.splitlines())) <= 100
    assert list(path.parent.iterdir()) == [path]


def test_options_stand_in_the_file(tmp_path):
    path = tmp_path / "registry.yaml"
    result = init(
        "rm3", path, "--scale", 0.0625, "--rows", 999, "--batch-size", 8, "--ranks", 3,
        "--layout", "stream", "--converter", "recd.partial_ikjt", "--data", tmp_path / "a: b",
        "--architecture", "dcn",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    registry = load_registry(path)
    generate = registry.dataset.options.generate
    assert generate.model_dump() | {"files": 1} == {
        "shape": "rm3", "scale": 0.0625, "rows": 999, "layout": "stream", "seed": 0,
        "row_group_rows": 2048, "files": 1,
    }  # fmt: skip
    assert registry.dataset.options.path.parent == tmp_path / "a: b"
    assert registry.converter.name == "recd.partial_ikjt"
    assert (registry.training.batch_size, registry.training.ranks) == (8, 3)
    assert (registry.model.architecture, registry.model.embedding_dim) == ("dcn", 8)
    assert "architecture: dcn # or dlrm" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("papercal", "--scale", 0.5), "papercal has one size"),
        (("rm1", "--scale", 0), "not in the range"),
        (("rm1", "--scale", 2), "not in the range"),
        (("rm1", "--rows", 511), "511 rows are no batch of 256 for each of 2 ranks"),
        (("rm4",), "rm4"),
    ],
)
def test_a_mistake_is_told_and_writes_nothing(tmp_path, arguments, message):
    result = init(arguments[0], tmp_path / "registry.yaml", *arguments[1:])
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_the_page_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "commands" / "init.md").read_text()
    (example,) = re.findall(r"```console\n\$ recd (.*?)\n(.*?)```", page, re.DOTALL)
    result = CliRunner().invoke(main, shlex.split(example[0]))
    assert (result.exit_code, result.output) == (0, example[1])
