"""Test suite for converter plugins, which build tensors from rows."""

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
_FILE, _FIRST_ROW = "rows.parquet", 300
_IDS = pa.list_(pa.int64())
_SESSIONS = [
    # history, history_times (they change together), tags
    ([2**63 - 1, 7, 7], [10, 11, 12], []),
    ([], [], [5]),
    ([7], [10], [5]),
]


class ConverterContract(PluginContract):
    """Test suite for a converter plugin. Subclasses override the fixture ``plugin``.

    The test data has the sparse features item (one id per row), history, history_times, tags and
    always_empty, the dense features hour and price, and the label clicked. history and
    history_times change in the same rows. Plugin options may only name these features.
    Override ``column``, too, if the converter does not read columns of type list<int64>.
    """

    #: Features that the plugin under test always deduplicates. Every schema contains them.
    deduplicated: ClassVar[tuple[str, ...]] = ()

    def column(self, values: list[Any], kind: pa.DataType) -> pa.Array:
        """Return an Arrow column with these values, in the type that the converter reads."""
        return pa.array(values, kind)

    @pytest.fixture
    def rows(self) -> Rows:
        """Return twelve rows of three sessions. Some are equal, some lists are empty."""
        sessions = [_SESSIONS[index // 4] for index in range(12)]
        columns: dict[str, tuple[list[Any], pa.DataType]] = {
            "item": ([3, 3, 4, 2**63 - 1, *range(8)], pa.int64()),
            "history": ([session[0] for session in sessions], _IDS),
            "history_times": ([session[1] for session in sessions], _IDS),
            "tags": ([[1], *(session[2] for session in sessions[1:])], _IDS),
            "always_empty": ([[]] * 12, _IDS),
            "hour": ([index % 24 for index in range(12)], pa.int64()),
            "price": ([index / 4 for index in range(12)], pa.float64()),
            "clicked": ([index % 2 for index in range(12)], pa.int64()),
        }
        data = {name: self.column(values, kind) for name, (values, kind) in columns.items()}
        return Rows(pa.RecordBatch.from_pydict(data), (Origin(_FILE, _FIRST_ROW, 12),))

    @pytest.fixture
    def fitted(self, plugin: Converter, rows: Rows) -> Converter:
        plugin.fit(rows, _SCHEMA)
        return plugin

    def test_changes_no_value(self, fitted: Converter, rows: Rows) -> None:
        _check_equal(fitted.convert(rows, _SCHEMA), rows)

    def test_a_pickled_copy_is_fitted(self, fitted: Converter, rows: Rows) -> None:
        """Reader processes use a pickled copy of the converter and never call ``fit``."""
        copy = pickle.loads(pickle.dumps(fitted))
        assert dict(copy.dedupe_factors()) == dict(fitted.dedupe_factors())
        batch, expected = copy.convert(rows, _SCHEMA), fitted.convert(rows, _SCHEMA)
        assert _expanded(batch) == _expanded(expected)
        for mine, its in zip(expected.ikjts, batch.ikjts, strict=True):
            assert torch.equal(mine.values(), its.values())
            assert torch.equal(mine.inverse_lookup(), its.inverse_lookup())

    def test_identity_is_of_what_it_converts_by(self, fitted: Converter) -> None:
        check_identity(fitted)

    @pytest.mark.parametrize(("start", "length"), [(0, 1), (3, 5), (4, 4), (11, 1)])
    def test_takes_part_of_a_batch(
        self, fitted: Converter, rows: Rows, start: int, length: int
    ) -> None:
        """The converter must accept Arrow slices, which start at an offset into shared buffers."""
        part = _part(rows, start, length)
        _check_equal(fitted.convert(part, _SCHEMA), part)

    def test_takes_features_in_the_order_of_the_schema(self, plugin: Converter, rows: Rows) -> None:
        """The converter must also ignore columns that are not in the schema."""
        sparse = tuple(dict.fromkeys(("tags", "item", *self.deduplicated)))
        schema = FeatureSchema(sparse, dense=("price", "hour"), label="clicked")
        plugin.fit(rows, schema)
        _check_equal(plugin.convert(rows, schema), rows, schema)

    def test_takes_data_without_dense_features(self, plugin: Converter, rows: Rows) -> None:
        schema = FeatureSchema(_SCHEMA.sparse, (), _SCHEMA.label)
        plugin.fit(rows, schema)
        _check_equal(plugin.convert(rows, schema), rows, schema)

    def test_stores_equal_rows_once(self, fitted: Converter, rows: Rows) -> None:
        """``dedupe_factors`` must have a value for each deduplicated feature, for the planner."""
        batch = fitted.convert(rows, _SCHEMA)
        unique: dict[str, int] = {}
        exact = [ikjt for partial in batch.partials for ikjt in partial.to_ikjt()]
        for ikjt in (*batch.ikjts, *exact):
            unique |= dict.fromkeys(ikjt.keys(), ikjt.num_unique())
        for feature in self.deduplicated:
            assert feature in unique, f"{feature} is neither in ikjts nor in partials"
            assert unique[feature] < len(rows), f"{feature} stores equal rows more than once"
        factors = fitted.dedupe_factors()
        assert set(factors) == set(unique), (
            "dedupe_factors() names the features in ikjts and partials"
        )
        assert all(factor >= 1 for factor in factors.values()), f"{factors}: a factor below 1"

    def test_leaves_rows_as_they_are(self, fitted: Converter, rows: Rows) -> None:
        before = rows.data.to_pylist()
        batch = fitted.convert(rows, _SCHEMA)
        batch.labels.zero_()
        batch.dense_features.zero_()
        assert rows.data.to_pylist() == before

    def test_leaves_what_it_returned_as_it_is(self, fitted: Converter, rows: Rows) -> None:
        batch = fitted.convert(rows, _SCHEMA)
        fitted.convert(_part(rows, 3, 5), _SCHEMA)
        _check_equal(batch, rows)

    @pytest.mark.parametrize(
        ("name", "null"),
        [
            *(("item", None), ("history", None), ("history", [1, None])),
            *(("price", None), ("hour", None), ("clicked", None)),
        ],
    )
    def test_refuses_a_null(self, fitted: Converter, rows: Rows, name: str, null: Any) -> None:
        """The DataError for a null must name the file, the column and the row."""
        values = rows.data.column(name).to_pylist()
        values[5] = null
        column = self.column(values, rows.data.schema.field(name).type)
        with pytest.raises(DataError) as caught:
            fitted.convert(_with_column(rows, name, column), _SCHEMA)
        message = str(caught.value)
        for part in (_FILE, name, str(_FIRST_ROW + 5)):
            assert part in message, f"{message!r} does not name {part}"

    @pytest.mark.parametrize("name", ["item", "history", "price", "clicked"])
    def test_refuses_a_missing_column_and_a_wrong_type(
        self, fitted: Converter, rows: Rows, name: str
    ) -> None:
        wrong = _with_column(rows, name, pa.array(["text"] * len(rows)))
        for each in (Rows(rows.data.drop_columns([name]), rows.origins), wrong):
            with pytest.raises(DataError, match=name):
                fitted.convert(each, _SCHEMA)


def _part(rows: Rows, start: int, length: int) -> Rows:
    return Rows(rows.data.slice(start, length), (Origin(_FILE, _FIRST_ROW + start, length),))


def _with_column(rows: Rows, name: str, column: pa.Array) -> Rows:
    index = rows.data.schema.get_field_index(name)
    return Rows(rows.data.set_column(index, name, column), rows.origins)


def _expanded(batch: Batch) -> dict[str, list[list[int]]]:
    """Return a dict from feature to the ids of each row of a batch, including repeated rows."""
    kjts = [ikjt.to_kjt() for ikjt in batch.ikjts]
    kjts += [partial.to_kjt() for partial in batch.partials]
    if batch.kjt is not None:
        kjts.append(batch.kjt)
    features: dict[str, list[list[int]]] = {}
    for kjt in kjts:
        for name, jagged in kjt.to_dict().items():
            assert name not in features, f"{name} stands in the batch twice"
            assert jagged.values().dtype == torch.int64
            bounds, values = jagged.offsets().tolist(), jagged.values().tolist()
            features[name] = [values[start:end] for start, end in pairwise(bounds)]
    return features


def _check_equal(batch: Batch, rows: Rows, schema: FeatureSchema = _SCHEMA) -> None:
    columns = {name: rows.data.column(name).to_pylist() for name in rows.data.schema.names}
    assert _expanded(batch) == {
        name: [value if isinstance(value, list) else [value] for value in columns[name]]
        for name in schema.sparse
    }
    assert batch.labels.dtype == torch.float32
    # Numbers keep 64 bits until preprocessing has read them.
    assert batch.dense_features.dtype in (torch.float32, torch.float64)
    assert batch.dense_features.shape == (len(rows), len(schema.dense))
    assert batch.dense_features.t().tolist() == [columns[name] for name in schema.dense]
    assert batch.labels.tolist() == columns[schema.label]
