"""The registry of its page plans and trains as the page says.

Where recd_plugin_tuning is absent, whose command makes its profiles, this is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from pydantic import BaseModel
from ruamel.yaml import YAML
from tests.docs.pages import blocks, plan_with, plugin_page, run_console

from recd_plugin_scars.hot_batches import HotBatches
from recd_plugins.cli import main
from recd_plugins.config.manager import PluginManager

PAGE = plugin_page("scars")
BLOCKS = blocks(PAGE, "yaml")


def _headings(text: str) -> list[list[str]]:
    """Of tables in it."""
    lines = [line for line in text.splitlines() if line.startswith("┃")]
    return [[word.strip() for word in line.split("┃")] for line in lines]


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole, *others = blocks(PAGE, "yaml")
    (tmp_path / "registry.yaml").write_text(whole, encoding="utf-8")
    printed = run_console(PAGE)
    assert " cached" in printed["recd plan registry.yaml"]
    compared = printed["recd run registry.yaml --compare"]
    assert _headings(PAGE)[-1] in _headings(compared)
    for entries in others:
        plan_with(whole, entries)


def test_the_page_names_every_option_of_the_cache() -> None:
    options = PluginManager().plugins["cache"]["scars.cache"].cls.Options
    for name, field in options.model_fields.items():
        assert re.search(rf"^\|.*`{name}`.* \|", PAGE, flags=re.MULTILINE), name
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                assert all(f"{key}: " in PAGE for key in inner.model_fields)


def test_it_trains_on_hot_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = YAML(typ="safe")
    (entries,) = (block for block in BLOCKS if "scars.hot_batches" in block)
    with Path("registry.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump({**yaml.load(BLOCKS[0]), **yaml.load(entries)}, stream)
    result = CliRunner().invoke(main, ["run", "registry.yaml"])
    assert result.exit_code == 0, result.output


def test_the_page_names_every_option_of_hot_batches() -> None:
    for option in HotBatches.Options.model_fields:
        assert re.search(rf"^\| .*`{option}`.* \|", PAGE, flags=re.MULTILINE), option
