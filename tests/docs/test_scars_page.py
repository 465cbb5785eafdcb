"""The registry of docs/plugins/scars.md plans and trains as the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from pydantic import BaseModel
from ruamel.yaml import YAML

from recd_plugins.cli import main
from recd_plugins.manager import PluginManager

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "scars.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def _headings(text: str) -> list[list[str]]:
    """Of tables in it."""
    lines = [line for line in text.splitlines() if line.startswith("┃")]
    return [[word.strip() for word in line.split("┃")] for line in lines]


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole, *others = blocks("yaml")
    (tmp_path / "registry.yaml").write_text(whole, encoding="utf-8")
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    shown = {}
    for line in lines:
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        shown[line] = result.stdout
    assert " cached" in shown["recd plan registry.yaml"]
    compared = shown["recd run registry.yaml --compare"]
    assert _headings(PAGE)[-1] in _headings(compared)
    for entries in others:
        other = {**YAML(typ="safe").load(whole), **YAML(typ="safe").load(entries)}
        with (tmp_path / "other.yaml").open("w", encoding="utf-8") as stream:
            YAML().dump(other, stream)
        result = CliRunner().invoke(main, ["plan", "other.yaml"])
        assert result.exit_code == 0, result.output


def test_the_page_names_every_option_of_the_cache() -> None:
    options = PluginManager().plugins["cache"]["scars.cache"].cls.Options
    for name, field in options.model_fields.items():
        assert re.search(rf"^\|.*`{name}`.* \|", PAGE, flags=re.MULTILINE), name
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                assert all(f"{key}: " in PAGE for key in inner.model_fields)
