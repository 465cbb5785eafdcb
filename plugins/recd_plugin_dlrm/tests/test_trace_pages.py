"""The pages on traces and random rows: options named, entries valid, commands run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tests.docs.pages import blocks, page, plugin_page, run_console

from recd_plugins.config.manager import PluginManager

COMMAND = page("commands/trace.md")


@pytest.mark.parametrize(("heading", "name"), [("Random", "dlrm.random"), ("Trace", "dlrm.trace")])
def test_the_entry_is_valid_and_every_option_is_named(heading: str, name: str) -> None:
    section = plugin_page("dlrm").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (example,) = blocks(section, "yaml")
    entry = YAML(typ="safe").load(example)["dataset"]
    assert entry["use"] == name
    options = PluginManager().plugins["dataset"][name].cls.Options
    options.model_validate(entry["options"])
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert set(options.model_fields) <= set(re.findall(r"`(\w+)`", table))


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (registry,) = blocks(COMMAND, "yaml")
    (tmp_path / "registry.yaml").write_text(registry)
    run_console(COMMAND)
    assert len((tmp_path / "usr_1.txt").read_text().splitlines()) == 20_000
