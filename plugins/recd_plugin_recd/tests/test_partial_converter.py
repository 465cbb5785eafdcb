"""What the contract of converters leaves open: what ``recd.partial_ikjt`` stores partially."""

import pyarrow as pa
import pytest
from pydantic import ValidationError

from recd_plugin_recd.partial_ikjt import PartialIkjtConverter
from recd_plugins.data.list_dict import decoded_field, list_dict_field, to_list_dict
from recd_plugins.interfaces import FeatureSchema, Origin, Rows

NUM_ROWS = 8
COLUMNS: dict[str, list[list[int]]] = {
    # One id is appended in each row, and from four on one falls out.
    "viewed": [list(range(max(0, row - 3), row + 1)) for row in range(NUM_ROWS)],
    "cart": [[1, 2]] * 4 + [[3]] * 4,
    "cart_seller": [[10, 20]] * 4 + [[30]] * 4,
    "item": [[7 * row] for row in range(NUM_ROWS)],
    "empty": [[]] * NUM_ROWS,
}
SCHEMA = FeatureSchema(sparse=tuple(COLUMNS), dense=(), label="label")


def rows_of(columns) -> Rows:
    data = {name: pa.array(lists, pa.list_(pa.int64())) for name, lists in columns.items()}
    data["label"] = pa.array([0] * NUM_ROWS)
    return Rows(pa.RecordBatch.from_pydict(data), (Origin("part-0.parquet", 0, NUM_ROWS),))


def make(**options) -> PartialIkjtConverter:
    return PartialIkjtConverter(PartialIkjtConverter.Options(**options))


def forms_of(converter) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Features that stay plain, groups of exact ones, groups of partial ones."""
    batch = converter.convert(rows_of(COLUMNS), SCHEMA)
    return (
        [] if batch.kjt is None else batch.kjt.keys(),
        [ikjt.keys() for ikjt in batch.ikjts],
        [partial.keys() for partial in batch.partials],
    )


def test_auto_stores_partially_what_moves_on_and_leaves_the_rest_to_recd_ikjt():
    converter = make()
    assert forms_of(converter) == (["item", "empty"], [["cart", "cart_seller"]], [["viewed"]])
    assert converter.dedupe_factors() == {
        "viewed": 26 / 8,
        "cart": 12 / 3,
        "cart_seller": 12 / 3,
    }


def test_a_gain_that_is_too_small_is_left_to_recd_ikjt():
    assert forms_of(make(min_gain=3.5)) == (
        ["viewed", "item", "empty"],
        [["cart", "cart_seller"]],
        [],
    )
    assert forms_of(make(min_dedupe_factor=3.5))[2] == []


def test_named_features_are_stored_partially_whatever_they_gain():
    names = list(COLUMNS)
    assert forms_of(make(features=["item", "viewed"])) == (
        ["empty"],
        [["cart", "cart_seller"]],
        [["viewed", "item"]],  # in the order of the schema
    )
    assert forms_of(make(features=names)) == ([], [], [names])
    assert forms_of(make(features=[], groups=[])) == (names, [], [])


def test_rows_shift_only_as_far_as_told():
    jumps = COLUMNS | {"viewed": [list(range(2 * row, 2 * row + 8)) for row in range(NUM_ROWS)]}
    for max_shift, stored in ((1, 64), (2, 22)):
        converter = make(features=["viewed"], max_shift=max_shift)
        (partial,) = converter.convert(rows_of(jumps), SCHEMA).partials
        assert partial.values().numel() == stored


def test_rows_in_another_order_gain_nothing():
    """Only the row before is looked at: sessions have to be clustered."""
    interleaved = {
        name: [lists[row // 2 + NUM_ROWS // 2 * (row % 2)] for row in range(NUM_ROWS)]
        for name, lists in {**COLUMNS, "viewed": [[row // 4] for row in range(NUM_ROWS)]}.items()
    }
    converter = make()
    converter.fit(rows_of(interleaved), SCHEMA)
    assert converter.report()["viewed"].partial == 1.0
    assert converter.report()["viewed"].exact == 4.0
    assert not converter.report()["viewed"].stored_partially


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["a"], "groups": [["a", "b"]]}, "in features and in groups: a"),
        ({"groups": [["a"], ["a"]]}, "one group only: a"),
        ({"max_shift": -1}, "max_shift"),
        ({"min_gain": 0.5}, "min_gain"),
        ({"features": "all"}, "features"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        PartialIkjtConverter.Options(**options)


def from_storage(columns) -> Rows:
    """The rows as a table hands them out that has ``viewed`` and ``cart`` in ``list_dict``."""
    rows = rows_of(columns)
    fields, arrays = list(rows.data.schema), rows.data.columns
    for index, name in enumerate(rows.data.schema.names):
        if name in ("viewed", "cart"):
            fields[index] = decoded_field(list_dict_field(name))
            arrays[index] = to_list_dict(arrays[index]).dictionary_encode()
    return Rows(pa.record_batch(arrays, schema=pa.schema(fields)), rows.origins)


def expanded(batch) -> dict[str, list[list[int]]]:
    kjts = [form.to_kjt() for form in (*batch.ikjts, *batch.partials)]
    kjts += [] if batch.kjt is None else [batch.kjt]
    return {
        key: [row.tolist() for row in jagged.to_dense()]
        for kjt in kjts
        for key, jagged in kjt.to_dict().items()
    }


@pytest.mark.parametrize("features", [["viewed"], ["viewed", "cart"], ["viewed", "cart", "empty"]])
def test_lists_that_storage_has_once_are_stored_partially_too(features):
    # The first list comes again at the end, so codes do not only rise.
    columns = COLUMNS | {"viewed": [*COLUMNS["viewed"][:6], [], COLUMNS["viewed"][0]]}
    batch = make(features=features).convert(from_storage(columns), SCHEMA)
    assert expanded(batch) == columns
    of_storage = batch.partials[0]
    assert of_storage.keys() == [name for name in features if name != "empty"]
    # Six rows bring one id each; the list that comes again brings none.
    assert of_storage.length_per_key()[0] == 6
