"""The contract of converters."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import torch

from recd_plugins.interfaces import Converter, FeatureSchema, Origin, Rows
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts.plugin import PluginContract, check_identity

_SCHEMA = FeatureSchema(
    sparse=("item", "history", "history_times", "tags", "always_empty"),
    dense=("hour", "price"),
    label="clicked",
)
_FILE = "rows.parquet"
_FIRST_ROW = 300  # of the batch in its file
_SESSIONS = [
    # history, history_times (they change together), tags
    ([2**63 - 1, 7, 7], [10, 11, 12], []),
    ([], [], [5]),
    ([7], [10], [5]),
]


class ConverterContract(PluginContract):
    """Tests of a converter plugin: override the fixture ``plugin``.

    The data has the sparse features item (one id a row), history and history_times (which change
    together), tags and always_empty, the dense features hour and price, and the label clicked. A
    converter whose options name features names some of these, and lists them in ``deduplicated``
    where it stores their equal rows once. One that reads columns of another form than list<int64>
    overrides ``column`` too.
    """

    #: Features that the plugin of the fixture deduplicates, whatever the data. They stand in every
    #: schema that it is shown.
    deduplicated: ClassVar[tuple[str, ...]] = ()

    def column(self, values: list[Any], kind: pa.DataType) -> pa.Array:
        """The Arrow column that the converter's storage has for these values."""
        return pa.array(values, kind)

    @pytest.fixture
    def rows(self) -> Rows:
        """Twelve rows of three sessions, with equal rows, empty rows and ids up to 2^63 - 1."""
        sessions = [_SESSIONS[index // 4] for index in range(12)]
        ids = pa.list_(pa.int64())
        return self._rows(
            {
                "item": ([3, 3, 4, 2**63 - 1, *range(8)], pa.int64()),
                "history": ([session[0] for session in sessions], ids),
                "history_times": ([session[1] for session in sessions], ids),
                "tags": ([[1], *(session[2] for session in sessions[1:])], ids),
                "always_empty": ([[]] * 12, ids),
                "hour": ([index % 24 for index in range(12)], pa.int64()),
                "price": ([index / 4 for index in range(12)], pa.float64()),
                "clicked": ([index % 2 for index in range(12)], pa.int64()),
            }
        )

    def test_changes_no_value(self, plugin: Converter, rows: Rows) -> None:
        plugin.fit(rows, _SCHEMA)
        _check_equal(plugin.convert(rows, _SCHEMA), rows)

    def test_a_pickled_copy_is_fitted(self, plugin: Converter, rows: Rows) -> None:
        """Readers in other processes get one, and never call ``fit``."""
        plugin.fit(rows, _SCHEMA)
        copy = pickle.loads(pickle.dumps(plugin))
        assert dict(copy.dedupe_factors()) == dict(plugin.dedupe_factors())
        batch, expected = copy.convert(rows, _SCHEMA), plugin.convert(rows, _SCHEMA)
        assert _expanded(batch) == _expanded(expected)
        for mine, its in zip(expected.ikjts, batch.ikjts, strict=True):
            assert torch.equal(mine.values(), its.values())
            assert torch.equal(mine.inverse_lookup(), its.inverse_lookup())

    def test_identity_is_of_what_it_converts_by(self, plugin: Converter, rows: Rows) -> None:
        plugin.fit(rows, _SCHEMA)
        check_identity(plugin)

    @pytest.mark.parametrize(("start", "length"), [(0, 1), (3, 5), (4, 4), (11, 1)])
    def test_takes_part_of_a_batch(
        self, plugin: Converter, rows: Rows, start: int, length: int
    ) -> None:
        """Slices share buffers with the whole: they start at an offset."""
        plugin.fit(rows, _SCHEMA)
        part = Rows(rows.data.slice(start, length), (Origin(_FILE, _FIRST_ROW + start, length),))
        _check_equal(plugin.convert(part, _SCHEMA), part)

    def test_takes_features_in_the_order_of_the_schema(self, plugin: Converter, rows: Rows) -> None:
        """And ignores columns that the schema does not name."""
        sparse = tuple(dict.fromkeys(("tags", "item", *self.deduplicated)))
        schema = FeatureSchema(sparse, dense=("price", "hour"), label="clicked")
        plugin.fit(rows, schema)
        _check_equal(plugin.convert(rows, schema), rows, schema)

    def test_takes_data_without_dense_features(self, plugin: Converter, rows: Rows) -> None:
        schema = FeatureSchema(_SCHEMA.sparse, (), _SCHEMA.label)
        plugin.fit(rows, schema)
        _check_equal(plugin.convert(rows, schema), rows, schema)

    def test_stores_equal_rows_once(self, plugin: Converter, rows: Rows) -> None:
        """Features of ``deduplicated``; the planner is told of all in ikjts and partials."""
        plugin.fit(rows, _SCHEMA)
        batch = plugin.convert(rows, _SCHEMA)
        unique: dict[str, int] = {}
        for ikjt in batch.ikjts:
            unique |= dict.fromkeys(ikjt.keys(), ikjt.num_unique())
        for partial in batch.partials:
            for ikjt in partial.to_ikjt():
                unique |= dict.fromkeys(ikjt.keys(), ikjt.num_unique())
        for feature in self.deduplicated:
            assert feature in unique, f"{feature} is neither in ikjts nor in partials"
            assert unique[feature] < len(rows), f"{feature} stores equal rows more than once"
        factors = plugin.dedupe_factors()
        assert set(factors) == set(unique), (
            "dedupe_factors() names the features in ikjts and partials"
        )
        assert all(factor >= 1 for factor in factors.values()), f"{factors}: a factor below 1"

    def test_leaves_rows_as_they_are(self, plugin: Converter, rows: Rows) -> None:
        before = rows.data.to_pylist()
        plugin.fit(rows, _SCHEMA)
        batch = plugin.convert(rows, _SCHEMA)
        batch.labels.zero_()
        batch.dense_features.zero_()
        assert rows.data.to_pylist() == before

    def test_leaves_what_it_returned_as_it_is(self, plugin: Converter, rows: Rows) -> None:
        plugin.fit(rows, _SCHEMA)
        batch = plugin.convert(rows, _SCHEMA)
        part = Rows(rows.data.slice(3, 5), (Origin(_FILE, _FIRST_ROW + 3, 5),))
        plugin.convert(part, _SCHEMA)
        _check_equal(batch, rows)

    @pytest.mark.parametrize("name", ["item", "history", "price", "hour", "clicked"])
    def test_refuses_a_null(self, plugin: Converter, rows: Rows, name: str) -> None:
        values = rows.data.column(name).to_pylist()
        values[5] = None
        self._check_refused(plugin, rows, name, values, row=5)

    def test_refuses_a_null_in_a_list(self, plugin: Converter, rows: Rows) -> None:
        values = rows.data.column("history").to_pylist()
        values[2] = [1, None]
        self._check_refused(plugin, rows, "history", values, row=2)

    @pytest.mark.parametrize("name", ["history", "price", "clicked"])
    def test_refuses_a_missing_column(self, plugin: Converter, rows: Rows, name: str) -> None:
        plugin.fit(rows, _SCHEMA)
        without = Rows(rows.data.drop_columns([name]), rows.origins)
        with pytest.raises(DataError, match=name):
            plugin.convert(without, _SCHEMA)

    @pytest.mark.parametrize("name", ["item", "history", "price", "clicked"])
    def test_refuses_a_wrong_type(self, plugin: Converter, rows: Rows, name: str) -> None:
        plugin.fit(rows, _SCHEMA)
        text = pa.array(["text"] * len(rows))
        index = rows.data.schema.get_field_index(name)
        with pytest.raises(DataError, match=name):
            plugin.convert(Rows(rows.data.set_column(index, name, text), rows.origins), _SCHEMA)

    def _rows(self, columns: dict[str, tuple[list[Any], pa.DataType]]) -> Rows:
        data = {name: self.column(values, kind) for name, (values, kind) in columns.items()}
        batch = pa.RecordBatch.from_pydict(data)
        return Rows(batch, (Origin(_FILE, _FIRST_ROW, batch.num_rows),))

    def _check_refused(
        self, plugin: Converter, rows: Rows, name: str, values: list[Any], row: int
    ) -> None:
        """The error names the file, the column and the row."""
        plugin.fit(rows, _SCHEMA)
        index = rows.data.schema.get_field_index(name)
        column = self.column(values, rows.data.schema.field(name).type)
        wrong = Rows(rows.data.set_column(index, name, column), rows.origins)
        with pytest.raises(DataError) as caught:
            plugin.convert(wrong, _SCHEMA)
        message = str(caught.value)
        for part in (_FILE, name, str(_FIRST_ROW + row)):
            assert part in message, f"{message!r} does not name {part}"


def _expanded(batch: Batch) -> dict[str, list[list[int]]]:
    """Ids by feature and row, duplicates put back."""
    kjts = [ikjt.to_kjt() for ikjt in batch.ikjts]
    kjts += [partial.to_kjt() for partial in batch.partials]
    if batch.kjt is not None:
        kjts.append(batch.kjt)
    features: dict[str, list[list[int]]] = {}
    for kjt in kjts:
        for name, jagged in kjt.to_dict().items():
            assert name not in features, f"{name} stands in the batch twice"
            assert jagged.values().dtype == torch.int64
            bounds = jagged.offsets().tolist()
            values = jagged.values().tolist()
            features[name] = [values[start:end] for start, end in pairwise(bounds)]
    return features


def _check_equal(batch: Batch, rows: Rows, schema: FeatureSchema = _SCHEMA) -> None:
    expected = {
        name: [
            value if isinstance(value, list) else [value]
            for value in rows.data.column(name).to_pylist()
        ]
        for name in schema.sparse
    }
    assert _expanded(batch) == expected
    dense = [rows.data.column(name).to_pylist() for name in schema.dense]
    assert batch.labels.dtype == torch.float32
    # Numbers of 64 bits stay so until preprocessing has seen them.
    assert batch.dense_features.dtype in (torch.float32, torch.float64)
    assert batch.dense_features.shape == (len(rows), len(schema.dense))
    assert batch.dense_features.t().tolist() == dense
    assert batch.labels.tolist() == rows.data.column(schema.label).to_pylist()
