"""The examples of docs/commands/plan.md run, and print what the page says.

Where recd_plugin_flexshard, recd_plugin_tuning or recd_plugin_scars is absent, this is left out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import blocks, page, run_console

from recd_plugins.planning.topologies import read_topology

PAGE = page("commands/plan.md")
TIERS = PAGE.split("\n## --tiers\n")[1].split("\n### ")[0]
CACHE = PAGE.split("\n## --cache\n")[1].split("\n## ")[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(section: str) -> None:
    """Its commands, of which the last prints what is shown."""
    (registry,), (shown,) = blocks(section, "yaml"), blocks(section, "text")
    Path("registry.yaml").write_text(registry)
    *_, printed = run_console(section).values()
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def report(path: Path) -> Any:
    return json.loads(path.read_text())


def test_tiers_are_as_shown(folder: Path) -> None:
    run(TIERS)
    written = report(folder / "tiers.json")
    described = TIERS.split("With `--json`: ")[1].split("Seconds have")[0]
    names = {"topology", "batch_size", "what_if", "entries", *written["entries"][0]}
    assert set(re.findall(r"`(\w+)`", described)) - {"collectives"} <= names
    assert (folder / "tiers.png").is_file()


def test_caches_are_as_shown(folder: Path) -> None:
    run(CACHE)
    written = report(folder / "cache.json")
    described = CACHE.split("With `--json`: ")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", described)) - {"lru"} == set(written)
    assert "lru" in written["bytes_per_step"]
    assert (folder / "cache.png").is_file()


def test_the_topology_is_valid(tmp_path: Path) -> None:
    (text,) = blocks(PAGE.split("\n## Topologies\n")[1].split("\n## ")[0], "yaml")
    (tmp_path / "here.yaml").write_text(text, encoding="utf-8")
    spec = read_topology(tmp_path / "here.yaml")
    assert spec.collectives is not None
    assert "tiers" in spec.sections
