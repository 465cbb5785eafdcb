"""The example of docs/commands/plan.md on tiers runs, and prints what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from recd_plugins.cli import main
from recd_plugins.planning.topologies import TopologySpec

PAGE = (Path(__file__).parents[2] / "docs" / "commands" / "plan.md").read_text()
TIERS = PAGE.split("\n## --tiers\n")[1].split("\n### ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_tiers_are_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (registry,), (console,), (shown,) = (
        blocks(TIERS, language) for language in ("yaml", "console", "text")
    )
    Path("registry.yaml").write_text(registry)
    for line in console.strip().splitlines():
        arguments = shlex.split(line.removeprefix("$ recd "))
        result = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()
    report = json.loads(Path("tiers.json").read_text())
    described = TIERS.split("With `--json`: ")[1].split("Seconds have")[0]
    names = {"topology", "batch_size", "what_if", "entries", *report["entries"][0]}
    assert set(re.findall(r"`(\w+)`", described)) - {"collectives"} <= names
    assert Path("tiers.png").is_file()


def test_the_topology_is_valid() -> None:
    (text,) = blocks(PAGE.split("\n## Topologies\n")[1].split("\n## ")[0], "yaml")
    spec = TopologySpec.model_validate(YAML(typ="safe").load(text))
    assert spec.collectives is not None
    assert spec.tiers is not None
