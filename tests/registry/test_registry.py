"""What a registry file that is right gives."""

import pytest

import recd_plugins
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


@pytest.fixture
def load(tmp_path, plugins_dir):
    def load(text: str = REGISTRY) -> recd_plugins.RunConfig:
        path = tmp_path / "registry.yaml"
        path.write_text(text)
        return recd_plugins.load_registry(path, plugins_dir=plugins_dir)

    return load


def test_makes_the_plugins_with_their_options(load):
    registry = load()
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
    registry = load()
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
    assert dead.endswith(
        "registry.yaml:12 sharding[0].tables: 't_usr' matches no table. Did you mean 't_user'?"
    )
    assert (
        "'nothing_like_it' matches no table. Use one of these tables: 't_user', 't_history"
        in unlike
    )
    assert "registry.yaml:13 sharding[1]: several entries match the tables 't_history'" in twice
    assert "sharding[0] (line 12) and sharding[1] (line 13)" in twice


def test_a_plugin_that_cannot_be_made_is_named_with_its_line_of_code(load):
    note = r":\d+ preprocessing\[0\]: plugin 'acme\.keep' failed in __init__ \(.*\.py:\d+"
    with pytest.raises(KeyError, match=note):
        load(REGISTRY.replace("buckets: 5", "buckets: 17"))
