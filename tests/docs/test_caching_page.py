"""The examples of docs/caching.md and of recd plan --cache run, and print what the pages say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugins.cli import main

DOCS = Path(__file__).parents[2] / "docs"
CACHE = (DOCS / "commands" / "plan.md").read_text().split("\n## --cache\n")[1].split("\n## ")[0]


def block(text: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return str(found)


def test_the_plan_is_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "caching.md").read_text()
    exec(compile(block(page, "python"), "caching.md", "exec"), {})
    assert capsys.readouterr().out == block(page, "text")


def test_caches_are_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("registry.yaml").write_text(block(CACHE, "yaml"))
    for line in block(CACHE, "console").strip().splitlines():
        arguments = shlex.split(line.removeprefix("$ recd "))
        result = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.splitlines()] == block(
        CACHE, "text"
    ).splitlines()
    report = json.loads(Path("cache.json").read_text())
    described = CACHE.split("With `--json`: ")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", described)) - {"lru"} == set(report)
    assert "lru" in report["bytes_per_step"]
    assert Path("cache.png").is_file()
