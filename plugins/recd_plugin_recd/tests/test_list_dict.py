"""Converter ``recd.list_dict``: exact on every table, and what ``recd.ikjt`` makes of lists."""

import pyarrow as pa
import pytest
import torch

from recd_plugin_recd.convert_layout import Conversion, convert
from recd_plugin_recd.ikjt import IkjtConverter, KjtConverter, ListDictConverter
from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.data.list_dict import concat_batches, list_dict_field, to_list_dict
from recd_plugins.interfaces import FeatureSchema, Origin, Rows
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import ConverterContract

IDS = pa.list_(pa.int64())
DICTIONARY = pa.dictionary(pa.int32(), pa.binary())
SCHEMA = FeatureSchema(("viewed", "seller", "item"), (), "label")


def stored(rows: Rows) -> Rows:
    """The same rows as they come out of a table in layout ``list_dict``."""
    fields, columns = [], []
    for field, column in zip(rows.data.schema, rows.data.columns, strict=True):
        if field.type == IDS and not column.flatten().null_count:
            field = list_dict_field(field.name).with_type(DICTIONARY).with_nullable(True)
            values = to_list_dict(column.fill_null([]))
            column = pa.array(
                [
                    None if null else value
                    for null, value in zip(
                        column.is_null().to_pylist(), values.to_pylist(), strict=True
                    )
                ],
                pa.binary(),
            ).dictionary_encode()
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


def rows_of(viewed, seller, item) -> Rows:
    lists = {"viewed": viewed, "seller": seller, "item": item}
    data = {name: pa.array(values, IDS) for name, values in lists.items()}
    data["label"] = pa.array([0] * len(item))
    return Rows(pa.RecordBatch.from_pydict(data), (Origin("part-0.parquet", 0, len(item)),))


def expanded(batch) -> dict[str, tuple[list[int], list[int]]]:
    kjts = [ikjt.to_kjt() for ikjt in batch.ikjts]
    kjts += [] if batch.kjt is None else [batch.kjt]
    return {
        key: (jagged.values().tolist(), jagged.lengths().tolist())
        for kjt in kjts
        for key, jagged in kjt.to_dict().items()
    }


def same(batch, other) -> bool:
    """Whether two batches are the same tensors."""
    ours, theirs = (
        [
            each.dense_features,
            each.labels,
            *(() if each.kjt is None else (each.kjt.values(), each.kjt.lengths())),
            *(
                part
                for ikjt in each.ikjts
                for part in (ikjt.values(), ikjt.lengths(), ikjt.inverse_lookup())
            ),
        ]
        for each in (batch, other)
    )
    assert [ikjt.keys() for ikjt in batch.ikjts] == [ikjt.keys() for ikjt in other.ikjts]
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def make(cls=ListDictConverter, **options):
    return cls(cls.Options(**options))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """3000 rows as lists and as list_dict, in row groups of whole sessions."""
    folder = tmp_path_factory.mktemp("layouts")
    write_table(folder / "list", TableOptions(rows=3000, seed=3))
    conversion = Conversion(folder / "list", folder / "list_dict", "list_dict", row_group_rows=1000)
    convert(conversion, force=False, start=lambda rows: lambda written: None)
    return folder


def batches(path, size):
    dataset = SessionParquet(SessionParquet.Options(path=path, prefetch=0))
    reader = dataset.reader(rank=0, world_size=1, batch_size=size, split="train")
    return dataset.schema(), list(reader)


@pytest.mark.parametrize(("size", "factor"), [(300, 1.0), (1000, 1.5), (300, 3.0)])
def test_batches_are_those_of_recd_ikjt_on_lists(tables, size, factor):
    """To the bit, so training is too. Batches lie in one row group or span several."""
    schema, from_lists = batches(tables / "list", size)
    dict_schema, from_dict = batches(tables / "list_dict", size)
    assert schema == dict_schema
    ikjt, passed_on = (make(cls, min_dedupe_factor=factor) for cls in (IkjtConverter, FromTable))
    for rows, coded in zip(from_lists, from_dict, strict=True):
        assert pa.types.is_dictionary(coded.data.schema.field("usr_3").type)
        assert same(passed_on.convert(coded, schema), ikjt.convert(rows, schema))
    assert passed_on.report() == ikjt.report()
    assert passed_on.dedupe_factors() == ikjt.dedupe_factors()


class FromTable(ListDictConverter):
    """The converter, which would be found out if it compared the ids of a dictionary."""

    name = "test.from_table"

    def _deduplicated(self, rows, groups):
        kinds = {rows.data.schema.field(name).type for group in groups for name in group}
        assert DICTIONARY in kinds
        return super()._deduplicated(rows, groups)


def test_a_list_of_two_row_groups_stays_two_rows_and_exact():
    part = stored(rows_of([[1], [], [1]], [[5], [6], [5]], [[1], [1], [1]]))
    both = Rows(concat_batches([part.data, part.data]), part.origins * 2)
    converter = make(groups=[["viewed"], ["seller", "item"]])
    batch = converter.convert(both, SCHEMA)
    assert batch.ikjts[0].inverse_lookup().tolist() == [0, 1, 0, 2, 3, 2]
    assert expanded(batch) == expanded(make(KjtConverter).convert(both, SCHEMA))


def test_a_group_of_both_layouts_is_deduplicated_by_ids():
    rows = rows_of([[1], [1], [2]], [[5], [5], [6]], [[1], [1], [1]])
    index = rows.data.schema.get_field_index("seller")
    coded = stored(rows)
    mixed = Rows(coded.data.set_column(index, "seller", rows.data["seller"]), rows.origins)
    groups = [["item"], ["viewed", "seller"]]
    batch = make(groups=groups).convert(mixed, SCHEMA)
    assert [ikjt.keys() for ikjt in batch.ikjts] == groups
    assert same(batch, make(IkjtConverter, groups=groups).convert(rows, SCHEMA))


@pytest.mark.parametrize("groups", [[["viewed"]], [["seller"], ["item", "viewed"]], []])
def test_bytes_that_are_no_ids_are_named(groups):
    rows = stored(rows_of([[1], [2], [2]], [[5], [5], [6]], [[1], [2], [3]]))
    column = pa.array([b"12345678", b"123", b""], pa.binary()).dictionary_encode()
    broken = rows.data.set_column(0, rows.data.schema.field(0), column)
    with pytest.raises(DataError, match=r"part-0\.parquet: row 1 .*'viewed'.* 3 bytes"):
        make(groups=groups).convert(Rows(broken, rows.origins), SCHEMA)
