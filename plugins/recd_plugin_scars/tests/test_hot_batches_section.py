"""docs/README.md: the registry file of its section on hot batches trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML
from tests.docs.pages import blocks, plugin_page

from recd_plugin_scars.hot_batches import HotBatches
from recd_plugins.cli import main

PAGE = plugin_page("scars")
BLOCKS = blocks(PAGE, "yaml")


def test_it_trains_on_hot_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = YAML(typ="safe")
    (entries,) = (block for block in BLOCKS if "scars.hot_batches" in block)
    with Path("registry.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump({**yaml.load(BLOCKS[0]), **yaml.load(entries)}, stream)
    result = CliRunner().invoke(main, ["run", "registry.yaml", "--json", "found.json"])
    assert result.exit_code == 0, result.output
    assert "samples by group" in result.stdout
    groups = json.loads(Path("found.json").read_text())["groups"]
    assert groups["hot"]["samples"] + groups["normal"]["samples"] == 16 * 64
    assert groups["hot"]["batches"] > 0
    assert groups["mixed"]["batches"] <= 1, "16 steps are one window"
    assert 0 < groups["hot"]["expected"] < 1


def test_the_page_names_every_option() -> None:
    for option in HotBatches.Options.model_fields:
        assert re.search(rf"^\| .*`{option}`.* \|", PAGE, flags=re.MULTILINE), option
