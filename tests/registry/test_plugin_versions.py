"""The versions of plugins: of distributions, files and folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.installed import Site, on_path

from recd_plugins import load_registry
from recd_plugins.config.run_config import plugin_versions

PLUGIN = '''
from recd_plugins.api import Preprocessing, hookimpl

class Keep(Preprocessing):
    """Leave ids as they are."""
    name = "acme.keep"
    def transform(self, values, offsets):
        return values, offsets
'''

HOOK = """
@hookimpl
def register_preprocessing():
    return [Keep]
"""

REGISTRY = """version: 1
dataset: {use: recd.session_parquet, options: {path: table}}
converter: {use: recd.kjt}
preprocessing:
  - {use: acme.keep, features: [user]}
"""


def version(registry: Path, plugins_dir: Path | None = None) -> str:
    return plugin_versions(load_registry(registry, plugins_dir=plugins_dir))["acme.keep"]


def test_a_class_that_is_not_in_the_module_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_path(tmp_path, monkeypatch):
        site = Site(tmp_path)
        (tmp_path / "module_of_core.py").write_text(PLUGIN, encoding="utf-8")
        site.install("acme", f"from module_of_core import Keep, hookimpl\n{HOOK}")
        assert version(site.registry(REGISTRY)) == "acme-plugins 1.0"


def test_a_folder_is_known_by_all_of_its_modules(tmp_path: Path) -> None:
    registry = tmp_path / "registry.yaml"
    registry.write_text(REGISTRY, encoding="utf-8")
    found = []
    for number in range(2):
        package = tmp_path / str(number) / "acme"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(PLUGIN + HOOK, encoding="utf-8")
        (package / "constants.py").write_text(f"SIZE = {number}\n", encoding="utf-8")
        (package / ".#constants.py").symlink_to("nobody@here")  # of an editor
        (package / "folder.py").mkdir()
        found.append(version(registry, package.parent))
    assert [each.split()[0] for each in found] == ["acme", "acme"]
    assert found[0] != found[1]
