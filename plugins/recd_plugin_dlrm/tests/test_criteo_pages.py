"""The pages on Criteo: options named, the example valid, the console as shown."""

from __future__ import annotations

import re

import click
from ruamel.yaml import YAML
from tests.docs.pages import blocks, page, plugin_page, run_console

from recd_plugin_dlrm.criteo.dataset import Criteo
from recd_plugins.cli import main

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


def test_every_option_of_every_subcommand_is_named():
    group = main.get_command(click.Context(main), "criteo")
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        part = COMMAND.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        usage = re.search(rf"^    recd criteo {name}(.*?)\n(    recd|\n)", COMMAND, re.M | re.S)
        assert usage
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert f"`{option}`" in part
                    assert option in usage[1]
