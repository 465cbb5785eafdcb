import json

import pytest
from tests.commands import invoke

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins import load_registry
from recd_plugins.config.run_config import feature_steps
from recd_plugins.data.preprocess import dense_columns
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.runtime.errors import RegistryError

SCHEMA = FeatureSchema(sparse=("user_id", "item_id"), dense=("user_age", "price"), label="label")
HEAD = """version: 1
dataset: {use: recd.session_parquet, options: {path: data}}
converter: {use: recd.kjt}
preprocessing:
"""


@pytest.fixture
def registry(cwd):

    def load(*entries: str):
        (cwd / "r.yaml").write_text(HEAD + "".join(f"  - {entry}\n" for entry in entries))
        return load_registry("r.yaml")

    return load


HASH = "{use: recd.sigrid_hash, features: [%s], options: {buckets: 9}}"
LOGIT = "{use: recd.logit, features: [%s]}"
CLAMP = "{use: recd.clamp, features: [%s], options: {lower: %s}}"


def names(registry) -> dict[str, list[str]]:
    steps = feature_steps(registry, SCHEMA)
    return {feature: [step.name for step in chain] for feature, chain in steps.items()}


def test_a_pattern_chooses_among_the_features_that_a_step_takes(registry):
    assert names(registry(HASH % '"*"', LOGIT % '"*"', CLAMP % ('"user_*"', 0))) == {
        "user_id": ["recd.sigrid_hash", "recd.clamp"],
        "item_id": ["recd.sigrid_hash"],
        "user_age": ["recd.logit", "recd.clamp"],
        "price": ["recd.logit"],
    }
    one_hot = registry("{use: recd.onehot, features: [user_age], options: {classes: 2}}")
    assert dense_columns(one_hot, SCHEMA) == ("user_age", "user_age", "price")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            HASH % "user_id, price",
            "r.yaml:5 preprocessing[0].features: 'recd.sigrid_hash' supports sparse features, "
            "but 'price' matches only 'price': dense (numbers)",
        ),
        (
            LOGIT % '"*_id"',
            "r.yaml:5 preprocessing[0].features: 'recd.logit' supports dense features, but "
            "'*_id' matches only 'user_id', 'item_id': sparse (ids)",
        ),
        (LOGIT % "prise", "'prise' matches no feature. Did you mean 'price'?"),
    ],
)
def test_a_pattern_without_a_feature_to_take_is_an_error(registry, entry, message):
    with pytest.raises(RegistryError) as caught:
        feature_steps(registry(entry), SCHEMA)
    assert message in str(caught.value)


def test_features_and_keys_are_told_together(registry, monkeypatch):
    loaded = registry(HASH % "price", LOGIT % "user_id", HASH % "item_id")
    text = loaded.path.read_text() + "model: {tables: {t_price: {num_embeddings: 9}}}\n"
    loaded.path.write_text(text)
    with pytest.raises(RegistryError) as caught:
        feature_steps(load_registry("r.yaml"), SCHEMA)
    of_features = ["preprocessing[0].features", "preprocessing[1].features", "model.tables.t_price"]
    assert [each.field for each in caught.value.problems] == of_features
    assert "the feature is a number, so it has no table" in str(caught.value)
    loaded.path.write_text(text.replace("[price]", "[prise]") + "training: {lerning_rate: 1}\n")
    monkeypatch.setattr(SessionParquet, "known_schema", lambda _: SCHEMA)
    entry = "sharding=[{use: torchrec.row_wise, tables: [x]}]"
    problems = json.loads(invoke("validate", "r.yaml", "--json", entry).stdout)["problems"]
    found = {each["field"] for each in problems}
    assert found == {*of_features, "training.lerning_rate", "sharding[0].tables"}
