"""The code of docs/plugins runs: each page's plugin loads and passes its kind's contract."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from recd_plugins.manager import KINDS, PluginManager

PAGES = Path(__file__).parents[2] / "docs" / "plugins"


def blocks(kind: str, language: str) -> list[str]:
    text = (PAGES / f"{kind}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def module_name(kind: str) -> str:
    """Of the plugin's file: the page names it right before the code."""
    match = re.search(r"`plugins/(\w+)\.py`:", (PAGES / f"{kind}.md").read_text())
    assert match
    return match[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_loads_and_its_registry_entry_is_valid(kind, tmp_path):
    (tmp_path / f"{module_name(kind)}.py").write_text(blocks(kind, "python")[0])
    entry = YAML(typ="safe").load(blocks(kind, "yaml")[0])[kind]
    entry = entry[0] if isinstance(entry, list) else entry
    registered = PluginManager(tmp_path).plugins[kind][entry["use"]]
    registered.cls(registered.cls.Options.model_validate(entry.get("options", {})))


def test_the_plugins_pass_their_contracts(tmp_path):
    """One process for all pages: importing torch takes most of the time."""
    (tmp_path / "plugins").mkdir()
    for kind in KINDS:
        plugin, test = blocks(kind, "python")
        (tmp_path / "plugins" / f"{module_name(kind)}.py").write_text(plugin)
        (tmp_path / f"test_{module_name(kind)}.py").write_text(test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "plugins"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", sorted(page.name for page in PAGES.iterdir()))
def test_every_page_is_listed(page):
    assert page == "README.md" or f"]({page})" in (PAGES / "README.md").read_text()
