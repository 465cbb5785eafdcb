"""What the contract of converters leaves open: the form of each feature, in either layout."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from recd_plugin_recd.convert_layout import convert
from recd_plugin_recd.ikjt import IkjtConverter, ListDictConverter
from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugin_recd.partial_ikjt import PartialIkjtConverter
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.data.list_dict import concat_batches, decoded_field, list_dict_field, to_list_dict
from recd_plugins.interfaces import FeatureSchema, Origin, Rows
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import ConverterContract

IDS = pa.list_(pa.int64())
Lists = dict[str, list[list[int]]]

COLUMNS: Lists = {
    "viewed": [[1, 2], [1, 2], [1, 2], [3, 4]],
    "seller": [[10, 20], [10, 20], [10, 20], [30, 40]],
    "bought": [[5], [5], [6], [6]],
    "item": [[1], [2], [3], [4]],
    "empty": [[], [], [], []],
}
MOVING: Lists = {
    # One id is appended in each row, and from four on one falls out.
    "viewed": [list(range(max(0, row - 3), row + 1)) for row in range(8)],
    "cart": [[1, 2]] * 4 + [[3]] * 4,
    "seller": [[10, 20]] * 4 + [[30]] * 4,
    "item": [[7 * row] for row in range(8)],
    "empty": [[]] * 8,
}


def rows_of(columns: Lists) -> Rows:
    data = {name: pa.array(lists, IDS) for name, lists in columns.items()}
    num_rows = len(next(iter(columns.values())))
    data["label"] = pa.array([0] * num_rows)
    return Rows(pa.RecordBatch.from_pydict(data), (Origin("part-0.parquet", 0, num_rows),))


def schema_of(columns: Lists) -> FeatureSchema:
    return FeatureSchema(sparse=tuple(columns), dense=(), label="label")


def make(cls: Any, **options: Any) -> Any:
    return cls(cls.Options(**options))


def fitted(cls: Any, columns: Lists, **options: Any) -> Any:
    converter = make(cls, **options)
    converter.fit(rows_of(columns), schema_of(columns))
    return converter


def forms_of(batch: Any) -> tuple[list[str], list[list[str]], list[list[str]]]:
    plain = [] if batch.kjt is None else batch.kjt.keys()
    return plain, [each.keys() for each in batch.ikjts], [each.keys() for each in batch.partials]


def expanded(batch: Any) -> Lists:
    kjts = [form.to_kjt() for form in (*batch.ikjts, *batch.partials)]
    kjts += [] if batch.kjt is None else [batch.kjt]
    pairs = chain.from_iterable(kjt.to_dict().items() for kjt in kjts)
    return {key: [row.tolist() for row in jagged.to_dense()] for key, jagged in pairs}


CART = [["cart", "seller"]]


@pytest.mark.parametrize(
    ("cls", "options", "forms"),
    [
        (IkjtConverter, {}, (["item", "empty"], [["viewed", "seller"], ["bought"]], [])),
        (IkjtConverter, {"min_dedupe_factor": 2.5}, (list(COLUMNS), [], [])),
        # Groups given by hand are kept, whatever their factor.
        (IkjtConverter, {"groups": [["bought", "item"]]},
         (["viewed", "seller", "empty"], [["bought", "item"]], [])),
        (PartialIkjtConverter, {}, (["item", "empty"], CART, [["viewed"]])),
        (PartialIkjtConverter, {"min_gain": 3.5}, (["viewed", "item", "empty"], CART, [])),
        # Named ones are stored partially, whatever they gain, in the order of the schema.
        (PartialIkjtConverter, {"features": ["item", "viewed"]},
         (["empty"], CART, [["viewed", "item"]])),
        (PartialIkjtConverter, {"features": [], "groups": []}, (list(MOVING), [], [])),
        (PartialIkjtConverter, {"groups": [["viewed"]]},
         (["cart", "seller", "item", "empty"], [["viewed"]], [])),
    ],
)  # fmt: skip
def test_forms_of_features(cls: Any, options: dict[str, Any], forms: Any) -> None:
    columns = COLUMNS if cls is IkjtConverter else MOVING
    batch = make(cls, **options).convert(rows_of(columns), schema_of(columns))
    assert forms_of(batch) == forms
    assert expanded(batch) == columns


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (IkjtConverter, {"groups": [["a", "b"], ["b"]]}, "more than once: 'b"),
        (PartialIkjtConverter, {"features": ["a"], "groups": [["a"]]}, "'groups' both contain 'a'"),
        (PartialIkjtConverter, {"groups": [["a"], ["a"]]}, "more than once: 'a"),
    ],
)
def test_wrong_options_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        cls.Options(**options)


def test_user_features_are_those_whose_rows_repeat_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`bought` changes more often than the others, `item` in every row."""
    schema = FeatureSchema(sparse=tuple(COLUMNS), dense=("age", "price"), label="label")
    data = rows_of(COLUMNS).data
    for name, numbers in (("age", [3.0, 3.0, 3.0, 4.0]), ("price", [1.0, 2.0, 3.0, 4.0])):
        data = data.append_column(name, pa.array(numbers))
    rows = Rows(data, rows_of(COLUMNS).origins)
    auto = make(IkjtConverter)
    auto.fit(rows, schema)
    batch = auto.convert(rows, schema)
    assert batch.user_features == ("viewed", "seller")
    assert batch.user_dense_columns == (0,)
    assert auto.user_features == ("viewed", "seller", "age")
    assert not caplog.text
    named = make(IkjtConverter, user_features=["bought", "price"])
    named.fit(rows, schema)
    batch = named.convert(rows, schema)
    assert (batch.user_features, batch.user_dense_columns) == (("bought",), (1,))
    assert "'price' changes most often" in caplog.text
    with pytest.raises(DataError, match=r"'pri\.ce' is not a feature\. Did you mean 'price'\?"):
        make(IkjtConverter, user_features=["pri.ce"]).fit(rows, schema)


def test_groups_that_part_after_the_sample_stay_exact() -> None:
    converter = fitted(IkjtConverter, COLUMNS, compare="all")
    later = {**COLUMNS, "seller": [[10, 20], [10, 21], [10, 20], [30, 40]]}
    batch = converter.convert(rows_of(later), schema_of(later))
    assert batch.ikjts[0].keys() == ["viewed", "seller"]
    assert batch.ikjts[0].inverse_lookup().tolist() == [0, 1, 0, 2]
    assert expanded(batch) == later


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
def test_what_rows_are_compared_with(
    compare: str, sample: Lists, neighbours_only: bool, lookup: list[int]
) -> None:
    converter = fitted(IkjtConverter, sample, compare=compare, min_dedupe_factor=1)
    assert converter.neighbours_only is neighbours_only
    batch = converter.convert(rows_of(RECURRING), schema_of(RECURRING))
    (bought,) = (ikjt for ikjt in batch.ikjts if "bought" in ikjt.keys())  # noqa: SIM118
    assert bought.inverse_lookup().tolist() == lookup
    assert expanded(batch) == RECURRING


def test_rows_shift_only_as_far_as_told() -> None:
    jumps = MOVING | {"viewed": [list(range(2 * row, 2 * row + 8)) for row in range(8)]}
    for max_shift, stored in ((1, 64), (2, 22)):
        converter = make(PartialIkjtConverter, features=["viewed"], max_shift=max_shift)
        (partial,) = converter.convert(rows_of(jumps), schema_of(jumps)).partials
        assert partial.values().numel() == stored


# Layout list_dict.


def coded(column: pa.Array) -> pa.Array:
    values = to_list_dict(column.fill_null([])).to_pylist()
    nulls = column.is_null().to_pylist()
    pairs = zip(nulls, values, strict=True)
    binary = [None if null else value for null, value in pairs]
    return pa.array(binary, pa.binary()).dictionary_encode()


def stored(rows: Rows, *names: str) -> Rows:
    fields, columns = [], []
    for field, column in zip(rows.data.schema, rows.data.columns, strict=True):
        wanted = field.name in names if names else field.type == IDS
        if wanted and not column.flatten().null_count:
            field = decoded_field(list_dict_field(field.name)).with_nullable(True)
            column = coded(column)
        fields.append(field)
        columns.append(column)
    return Rows(pa.record_batch(columns, schema=pa.schema(fields)), rows.origins)


class FromStorage(ListDictConverter):
    """The converter, shown the same rows from storage."""

    name = "test.from_storage"

    def fit(self, sample, schema):
        super().fit(stored(sample), schema)

    def convert(self, rows, schema):
        return super().convert(stored(rows), schema)


class TestFromStorage(ConverterContract):
    deduplicated = ("history", "history_times", "tags")

    @pytest.fixture
    def plugin(self):
        return FromStorage(FromStorage.Options())

    def test_module_imports_without_torch(self, plugin):
        """That of the converter itself is tested with the other built-in ones."""


@pytest.mark.parametrize("features", [["viewed"], ["viewed", "cart", "empty"]])
def test_lists_that_storage_has_once_are_stored_partially_too(features: list[str]) -> None:
    # The first list comes again at the end, so codes do not only rise.
    columns = MOVING | {"viewed": [*MOVING["viewed"][:6], [], MOVING["viewed"][0]]}
    rows = stored(rows_of(columns), "viewed", "cart")
    batch = make(PartialIkjtConverter, features=features).convert(rows, schema_of(columns))
    assert expanded(batch) == columns
    of_storage = batch.partials[0]
    assert of_storage.keys() == [name for name in features if name != "empty"]
    # Six rows bring one id each; the list that comes again brings none.
    assert of_storage.length_per_key()[0] == 6


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    write_table(folder / "list", TableOptions(rows=2000, seed=3))
    convert(folder / "list", folder / "list_dict", "list_dict", row_group_rows=1000)
    return folder


def tensors(batch: Any) -> list[Any]:
    found = [batch.dense_features, batch.labels]
    found += [] if batch.kjt is None else [batch.kjt.values(), batch.kjt.lengths()]
    for ikjt in batch.ikjts:
        found += [ikjt.values(), ikjt.lengths(), ikjt.inverse_lookup()]
    return found


def same(batch: Any, other: Any) -> bool:
    assert forms_of(batch) == forms_of(other)
    return all(map(torch.equal, tensors(batch), tensors(other)))


@pytest.mark.parametrize(("size", "factor"), [(1000, 1.5), (300, 3.0)])
def test_batches_are_those_of_recd_ikjt_on_lists(tables, size, factor):
    """To the bit, so training is too. Batches lie in one row group or span several."""
    readers, schemas = [], []
    for layout in ("list", "list_dict"):
        dataset = SessionParquet(SessionParquet.Options(path=tables / layout, prefetch=0))
        schemas.append(dataset.schema())
        readers.append(dataset.reader(rank=0, world_size=1, batch_size=size, split="train"))
    assert schemas[0] == schemas[1]
    classes = (IkjtConverter, ListDictConverter)
    ikjt, passed_on = (make(cls, min_dedupe_factor=factor) for cls in classes)
    for rows, rows_of_dict in zip(*readers, strict=True):
        batch = passed_on.convert(rows_of_dict, schemas[0])
        assert same(batch, ikjt.convert(rows, schemas[0]))
    assert passed_on.report() == ikjt.report()


THREE: Lists = {"viewed": [[1], [], [1]], "seller": [[5], [6], [5]], "item": [[1], [1], [1]]}


def test_a_list_of_two_row_groups_stays_two_rows_and_exact():
    part = stored(rows_of(THREE))
    both = Rows(concat_batches([part.data, part.data]), part.origins * 2)
    converter = make(ListDictConverter, groups=[["viewed"], ["seller", "item"]])
    batch = converter.convert(both, schema_of(THREE))
    assert batch.ikjts[0].inverse_lookup().tolist() == [0, 1, 0, 2, 3, 2]
    assert expanded(batch) == {name: lists * 2 for name, lists in THREE.items()}


@pytest.mark.parametrize("groups", [[["viewed"]], [["seller"], ["item", "viewed"]], []])
def test_bytes_that_are_no_ids_are_named(groups):
    rows = stored(rows_of(THREE))
    column = pa.array([b"12345678", b"123", b""], pa.binary()).dictionary_encode()
    broken = rows.data.set_column(0, rows.data.schema.field(0), column)
    converter = make(ListDictConverter, groups=groups)
    with pytest.raises(DataError, match=r"part-0\.parquet: row 1 .*'viewed'.* 3 bytes"):
        converter.convert(Rows(broken, rows.origins), schema_of(THREE))
