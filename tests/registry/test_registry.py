"""What a registry file that is right gives, and the versions of its plugins."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.installed import Site, on_path

from recd_plugins import load_registry
from recd_plugins.config.run_config import plugin_versions
from recd_plugins.runtime.errors import RegistryError

REGISTRY = """\
version: 1
dataset: {use: acme.data, options: {path: clicks}}
converter: {use: acme.plain}
preprocessing:
  - {use: acme.keep, features: ["*"], options: {buckets: 5}}
  - {use: acme.keep, features: [item, history], options: {buckets: 7}}
  - {use: acme.keep, features: [item], enabled: false}
pooling:
  - use: acme.max
    features: [history]
sharding:
  - {use: acme.stock, tables: ["t_[ui]*"]}
  - {use: acme.stock, tables: [t_history]}
cache: []
training: {batch_size: 64, learning_rate: 1e-3, checkpoint: {path: there, every: 5}}
"""


def test_makes_the_plugins_with_their_options(load):
    registry = load(REGISTRY)
    assert registry.dataset.name == "acme.data"
    assert registry.dataset.options.path == "clicks"
    assert registry.dataset.options.rows == 10
    assert registry.converter.name == "acme.plain"
    assert [entry.plugin.options.buckets for entry in registry.preprocessing] == [5, 7]
    assert [entry.plugin.name for entry in registry.pooling] == ["acme.max"]
    assert registry.cache == ()
    assert registry.training.learning_rate == 1e-3
    assert registry.training.checkpoint.every == 5
    assert registry.training.optimizer == "rowwise_adagrad"
    assert registry.model is None


def test_a_feature_has_entries_in_order_and_a_table_one_or_none(load):
    registry = load(REGISTRY)
    first, second = registry.preprocessing
    claims = registry.claim("preprocessing", ["user", "item", "history"])
    assert claims == {"user": (first,), "item": (first, second), "history": (first, second)}
    names = ["t_user", "t_history", "t_other"]
    first, second = registry.sharding
    assert registry.claim("sharding", names) == {"t_user": first, "t_history": second}
    assert registry.claim("cache", names) == {}


def test_two_claims_and_dead_patterns_are_told_together(load):
    registry = load(REGISTRY.replace('"t_[ui]*"', '"t_*", t_usr, nothing_like_it'))
    with pytest.raises(RegistryError) as caught:
        registry.claim("sharding", ["t_user", "t_history"])
    dead, unlike, twice = [str(problem) for problem in caught.value.problems]
    told = "r.yaml:12 sharding[0].tables: 't_usr' matches no table. Did you mean 't_user'?"
    assert dead.endswith(told)
    told = "'nothing_like_it' matches no table. Use one of these tables: 't_user', 't_history"
    assert told in unlike
    assert "r.yaml:13 sharding[1]: several entries match the tables 't_history'" in twice
    assert "sharding[0] (line 12) and sharding[1] (line 13)" in twice
    with pytest.raises(RegistryError, match="'t_usr' matches no table: the model has none for 'sh"):
        registry.claim("sharding", [])


def test_a_plugin_that_cannot_be_made_is_named_with_its_line_of_code(load):
    note = r":\d+ preprocessing\[0\]: plugin 'acme\.keep' failed in __init__ \(.*\.py:\d+"
    with pytest.raises(KeyError, match=note):
        load(REGISTRY.replace("buckets: 5", "buckets: 17"))


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

OF_A_PLUGIN = """version: 1
dataset: {use: recd.session_parquet, options: {path: table}}
converter: {use: recd.kjt}
preprocessing:
  - {use: acme.keep, features: [user]}
"""


def version(registry: Path, plugins_dir: Path | None = None) -> str:
    return plugin_versions(load_registry(registry, plugins_dir=plugins_dir))["acme.keep"]


def test_a_class_of_another_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_path(tmp_path, monkeypatch):
        site = Site(tmp_path)
        (tmp_path / "module_of_core.py").write_text(PLUGIN, encoding="utf-8")
        site.install("acme", f"from module_of_core import Keep, hookimpl\n{HOOK}")
        assert version(site.registry(OF_A_PLUGIN)) == "acme-plugins 1.0"


def test_a_folder_is_known_by_all_of_its_modules(tmp_path: Path) -> None:
    registry = tmp_path / "registry.yaml"
    registry.write_text(OF_A_PLUGIN, encoding="utf-8")
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
