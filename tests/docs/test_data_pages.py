"""The examples of the pages on data run."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML
from tests.docs.pages import blocks, page, plugin_page, run_console

from recd_plugins.cli import main
from recd_plugins.config.manager import PluginManager


def test_python_of_data_md_runs_as_one_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = blocks(page("data.md"), "python")
    assert len(code) == 4
    exec(compile("\n".join(code), "docs/data.md", "exec"), {})


@pytest.mark.parametrize("name", ["generate", "convert-layout"])
def test_the_console_prints_what_the_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_console(page(f"commands/{name}.md"))


def test_generate_md_names_every_option():
    text = page("commands/generate.md")
    options = re.findall(r"--[a-z-]+", CliRunner().invoke(main, ["generate", "--help"]).output)
    assert set(options) - {"--help"} <= set(re.findall(r"--[a-z-]+", text))


@pytest.mark.parametrize("name", ["recd.session_parquet", "recd.interactions"])
def test_recd_md_shows_valid_options_and_names_them_all(name):
    cls = PluginManager().plugins["dataset"][name].cls
    sections = plugin_page("recd").split("\n## ")
    (section,) = (text for text in sections if text.startswith(f"Dataset {name}\n"))
    (example,) = blocks(section, "yaml")
    entry = YAML(typ="safe").load(example)["dataset"]
    assert entry["use"] == name
    cls.Options.model_validate(entry["options"])
    assert all(f"`{option}`" in section for option in cls.Options.model_fields)
