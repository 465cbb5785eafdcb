"""The pages on Criteo: options named, the example valid, the console as shown."""

from __future__ import annotations

import re

from ruamel.yaml import YAML
from tests.docs.pages import blocks, page, plugin_page, run_console

from recd_plugin_dlrm.criteo.dataset import Criteo

COMMAND = page("commands/criteo.md")


def test_the_example_is_valid_and_every_option_is_named():
    section = plugin_page("dlrm").partition("\n## Criteo\n")[2].partition("\n## ")[0]
    (example,) = blocks(section, "yaml")
    entry = YAML(typ="safe").load(example)["dataset"]
    assert entry["use"] == Criteo.name
    Criteo.Options.model_validate(entry["options"])
    named = re.findall(r"`(\w+)`", section.partition("\n### ")[0])
    assert set(Criteo.Options.model_fields) <= set(named)


def test_the_console_prints_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(run_console(COMMAND)) == 2
