"""What the contract of converters leaves open: how ``recd.ikjt`` groups."""

import pyarrow as pa
import pytest
from pydantic import ValidationError

from recd_plugin_recd.ikjt import IkjtConverter, KjtConverter
from recd_plugin_recd.papercal import FEATURES, chunks, make_rows, row_keys
from recd_plugins.interfaces import FeatureSchema, Origin, Rows

COLUMNS = {
    "viewed": [[1, 2], [1, 2], [1, 2], [3, 4]],
    "viewed_seller": [[10, 20], [10, 20], [10, 20], [30, 40]],
    "bought": [[5], [5], [6], [6]],
    "item": [[1], [2], [3], [4]],
    "empty": [[], [], [], []],
}
SCHEMA = FeatureSchema(sparse=tuple(COLUMNS), dense=(), label="label")


def rows_of(columns) -> Rows:
    data = {name: pa.array(lists, pa.list_(pa.int64())) for name, lists in columns.items()}
    data["label"] = pa.array([0] * 4)
    return Rows(pa.RecordBatch.from_pydict(data), (Origin("part-0.parquet", 0, 4),))


def make(**options) -> IkjtConverter:
    return IkjtConverter(IkjtConverter.Options(**options))


def keys_of(batch) -> tuple[list[str], list[list[str]]]:
    plain = [] if batch.kjt is None else batch.kjt.keys()
    return plain, [ikjt.keys() for ikjt in batch.ikjts]


def test_auto_groups_what_changes_together_and_leaves_the_rest_plain():
    converter = make()
    converter.fit(rows_of(COLUMNS), SCHEMA)
    plain, grouped = keys_of(converter.convert(rows_of(COLUMNS), SCHEMA))
    assert grouped == [["viewed", "viewed_seller"], ["bought"]]
    assert plain == ["item", "empty"]


def test_groups_that_part_after_the_sample_stay_exact():
    converter = make(compare="all")
    converter.fit(rows_of(COLUMNS), SCHEMA)
    later = {**COLUMNS, "viewed_seller": [[10, 20], [10, 21], [10, 20], [30, 40]]}
    batch = converter.convert(rows_of(later), SCHEMA)
    together = batch.ikjts[0]
    assert together.keys() == ["viewed", "viewed_seller"]
    assert together.inverse_lookup().tolist() == [0, 1, 0, 2]
    back = together.to_kjt()["viewed_seller"].to_dense()
    assert [row.tolist() for row in back] == later["viewed_seller"]


RECURRING = {**COLUMNS, "bought": [[5], [6], [5], [5]]}


@pytest.mark.parametrize(
    ("compare", "sample", "neighbours_only", "lookup"),
    [
        ("auto", COLUMNS, True, [0, 1, 2, 2]),
        ("auto", RECURRING, False, [0, 1, 0, 0]),
        ("neighbours", RECURRING, True, [0, 1, 2, 2]),
        ("all", COLUMNS, False, [0, 1, 0, 0]),
    ],
)
def test_what_rows_are_compared_with(compare, sample, neighbours_only, lookup):
    converter = make(compare=compare, min_dedupe_factor=1)
    converter.fit(rows_of(sample), SCHEMA)
    assert converter.neighbours_only is neighbours_only
    batch = converter.convert(rows_of(RECURRING), SCHEMA)
    (bought,) = (ikjt for ikjt in batch.ikjts if "bought" in ikjt.keys())  # noqa: SIM118
    assert bought.inverse_lookup().tolist() == lookup
    back = bought.to_kjt()["bought"].to_dense()
    assert [row.tolist() for row in back] == RECURRING["bought"]


def test_groups_given_by_hand_are_kept_whatever_their_factor():
    converter = make(groups=[["bought", "item"]])
    converter.fit(rows_of(COLUMNS), SCHEMA)
    plain, grouped = keys_of(converter.convert(rows_of(COLUMNS), SCHEMA))
    assert grouped == [["bought", "item"]]
    assert plain == ["viewed", "viewed_seller", "empty"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [["a", "b"], ["b"]]}, "one group only: b"),
        ({"groups": "automatic"}, "groups"),
        ({"min_dedupe_factor": 0.5}, "min_dedupe_factor"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        IkjtConverter.Options(**options)


def test_papercal_is_deduplicated_by_its_clocks_and_equals_the_plain_path():
    keys = next(chunks(row_keys(512, seed=1, layout="clustered"), 512))
    rows = Rows(make_rows(keys), (Origin("papercal", 0, 512),))
    schema = FeatureSchema(
        sparse=tuple(feature.name for feature in FEATURES), dense=("dense_0",), label="label"
    )
    converter = make()
    converter.fit(rows, schema)
    batch = converter.convert(rows, schema)
    clocks: dict[int, list[str]] = {}
    for feature in FEATURES:
        if not feature.name.startswith("item_"):
            clocks.setdefault(feature.clock, []).append(feature.name)
    plain, grouped = keys_of(batch)
    assert grouped == list(clocks.values())
    assert plain == [name for name in schema.sparse if name.startswith("item_")]
    expected = KjtConverter(KjtConverter.Options()).convert(rows, schema).kjt.to_dict()
    for kjt in (batch.kjt, *(ikjt.to_kjt() for ikjt in batch.ikjts)):
        for key, jagged in kjt.to_dict().items():
            assert jagged.values().equal(expected[key].values())
            assert jagged.lengths().equal(expected[key].lengths())
