"""The pages on Criteo: options named, the example valid, the console as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
from click.testing import CliRunner
from ruamel.yaml import YAML

from recd_plugin_dlrm.criteo.dataset import Criteo
from recd_plugins.cli import main

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = (DOCS / "commands" / "criteo.md").read_text()


def section() -> str:
    text = (DOCS / "plugins" / "dlrm.md").read_text()
    return text.partition("\n## Criteo\n")[2].partition("\n## ")[0]


def test_the_example_is_valid_and_every_option_is_named():
    (example,) = re.findall(r"```yaml\n(.*?)```", section(), re.DOTALL)
    entry = YAML(typ="safe").load(example)["dataset"]
    assert entry["use"] == Criteo.name
    Criteo.Options.model_validate(entry["options"])
    named = re.findall(r"`(\w+)`", section().partition("\n### ")[0])
    assert set(Criteo.Options.model_fields) <= set(named)


def test_the_console_prints_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (console,) = re.findall(r"```console\n(.*?)```", COMMAND, re.DOTALL)
    for example in console.split("$ ")[1:]:
        command, _, expected = example.partition("\n")
        recd, *arguments = shlex.split(command)
        assert recd == "recd"
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        # Sizes depend on the versions of compressors.
        size = re.compile(r"[\d.]+ MB")
        assert size.sub("", result.stdout) == size.sub("", expected)


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
