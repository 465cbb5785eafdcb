"""The code of docs/plugins runs: each page's plugin loads and passes its kind's contract."""

import re

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML
from tests.docs.pages import DOCS, blocks, page, run_tests_of_plugins

from recd_plugins.cli import main
from recd_plugins.manager import KINDS, PluginManager

PAGES = sorted(path.name for path in (DOCS / "plugins").iterdir())


def text_of(kind: str) -> str:
    return page(f"plugins/{kind}.md")


def module_name(kind: str) -> str:
    """Of the plugin's file: the page names it right before the code."""
    match = re.search(r"`plugins/(\w+)\.py`:", text_of(kind))
    assert match
    return match[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_loads_and_its_registry_entry_is_valid(kind, tmp_path):
    (tmp_path / f"{module_name(kind)}.py").write_text(blocks(text_of(kind), "python")[0])
    entry = YAML(typ="safe").load(blocks(text_of(kind), "yaml")[0])[kind]
    entry = entry[0] if isinstance(entry, list) else entry
    registered = PluginManager(tmp_path).plugins[kind][entry["use"]]
    registered.cls(registered.cls.Options.model_validate(entry.get("options", {})))


def test_the_plugins_pass_their_contracts(tmp_path):
    """One process for all pages: importing torch takes most of the time."""
    (tmp_path / "plugins").mkdir()
    for kind in KINDS:
        plugin, test = blocks(text_of(kind), "python")
        (tmp_path / "plugins" / f"{module_name(kind)}.py").write_text(plugin)
        (tmp_path / f"test_{module_name(kind)}.py").write_text(test)
    run_tests_of_plugins(tmp_path)


def test_the_mode_of_recd_plan_runs(tmp_path):
    (tmp_path / "epoch.py").write_text(blocks(page("plugins/README.md"), "python")[-2])
    (registry,) = (DOCS.parent / "examples" / "random").glob("registry.yaml")
    command = ["--plugins-dir", str(tmp_path), "plan", str(registry), "--epoch", "--batch-size"]
    result = CliRunner().invoke(main, [*command, "100", "--nodes", "1", "--ranks-per-node", "2"])
    assert result.stdout == "5000 steps of 200 rows\n", result.output


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_listed(name):
    assert name == "README.md" or f"]({name})" in page("plugins/README.md")
