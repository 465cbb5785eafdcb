"""The registry of docs/plugins/flexshard.md plans and trains as the page says."""

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

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "flexshard.md").read_text()
SHARDINGS = {
    name: found.cls
    for name, found in PluginManager().plugins["sharding"].items()
    if name.startswith("flexshard.")
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole, *others = blocks("yaml")
    fewer = whole.replace("ranks: 4, ranks_per_node: 2", "ranks: 2, ranks_per_node: 1")
    assert fewer != whole  # two nodes still, in half the time
    (tmp_path / "registry.yaml").write_text(fewer, encoding="utf-8")
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    shown = []
    for line in lines:
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        shown.append(result.stdout)
    planned, compared, _, _ = shown
    assert " hot" in planned
    assert "tiers of rows" in compared
    for entries in others:
        other = {**YAML(typ="safe").load(whole), **YAML(typ="safe").load(entries)}
        with (tmp_path / "other.yaml").open("w", encoding="utf-8") as stream:
            YAML().dump(other, stream)
        result = CliRunner().invoke(main, ["plan", "other.yaml"])
        assert result.exit_code == 0, result.output


def test_the_page_names_every_plugin_and_option() -> None:
    assert len(SHARDINGS) == 3
    for name, cls in SHARDINGS.items():
        assert f"| `{name}` |" in PAGE
        for option, field in cls.Options.model_fields.items():
            assert f"| `{option}` | " in PAGE
            for inner in get_args(field.annotation):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    assert all(f"`{key}`" in PAGE for key in inner.model_fields)
