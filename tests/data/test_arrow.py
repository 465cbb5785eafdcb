from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from recd_plugins.data.arrow import dense_features, labels, sparse_column
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.runtime.errors import DataError

FILE = "part-0.parquet"


def make_rows(**columns) -> Rows:
    batch = pa.RecordBatch.from_pydict(columns)
    return Rows(batch, (Origin(FILE, 100, batch.num_rows),))


def as_lists(column) -> list[list[int]]:
    values, offsets = column
    assert values.dtype == np.int64
    return [values[a:b].tolist() for a, b in pairwise(offsets)]


@pytest.mark.parametrize("list_type", [pa.list_, pa.large_list])
@pytest.mark.parametrize(
    "item", [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64()]
)
def test_lists_of_any_integer(list_type, item):
    lists = [[1, 2], [], [3], [100]]
    rows = make_rows(f=pa.array(lists, list_type(item)), one=pa.array([5, 6, 7, 8], item))
    assert as_lists(sparse_column(rows, "f")) == lists
    assert as_lists(sparse_column(rows, "one")) == [[5], [6], [7], [8]]


@pytest.mark.parametrize("item", [pa.int32(), pa.int64()])
@pytest.mark.parametrize(("start", "length"), [(0, 4), (1, 2), (2, 2), (3, 1), (4, 0)])
def test_slices(item, start, length):
    lists = [[1, 2], [], [3], [4, 5]]
    whole = pa.RecordBatch.from_pydict({"f": pa.array(lists, pa.list_(item))})
    rows = Rows(whole.slice(start, length), (Origin(FILE, start, length),))
    assert as_lists(sparse_column(rows, "f")) == lists[start : start + length]


def test_lists_of_int64_are_not_copied():
    column = pa.array([[1, 2], [3], [2**63 - 1]], pa.list_(pa.int64())).slice(1)
    values, offsets = sparse_column(make_rows(f=column), "f")
    assert values.ctypes.data == column.values.buffers()[1].address
    assert offsets.ctypes.data == column.buffers()[1].address + 4
    assert values[offsets[1]] == 2**63 - 1


@pytest.mark.parametrize(
    ("column", "parts"),
    [
        (pa.array([1.0, None]), ["row 101", "null", "price"]),
        (pa.array(["a", "b"]), ["row 100", "string", "number", "price"]),
        (pa.array([[1], None, [2]], pa.list_(pa.int64())), ["row 101", "null"]),
        (pa.array([[1], [], [2, None]], pa.list_(pa.int64())), ["row 102", "null", "[2, None]"]),
        (pa.array([[1], [None]], pa.list_(pa.int32())), ["row 101", "[None]"]),
        (pa.array([1, None]), ["row 101", "null"]),
        (pa.array(["a", "b"]), ["row 100", "string", "list<int64>"]),
        (pa.array([[1.5]]), ["row 100", "double"]),
        (pa.array([[1]], pa.list_(pa.uint64())), ["row 100", "uint64"]),
    ],
)
def test_errors_of_columns_say_where(column, parts):
    name = "price" if "price" in parts else "clicks"
    rows = make_rows(**{name: column})
    with pytest.raises(DataError) as caught:
        dense_features(rows, (name,)) if name == "price" else sparse_column(rows, name)
    for part in (FILE, repr(name), *parts):
        assert part in str(caught.value)


def test_rows_from_several_files_are_told_apart():
    batch = pa.RecordBatch.from_pydict({"f": pa.array([1, 2, None])})
    rows = Rows(batch, (Origin("a.parquet", 7, 2), Origin("b.parquet", 0, 1)))
    with pytest.raises(DataError, match=r"^b\.parquet: row 0 "):
        sparse_column(rows, "f")


def test_a_missing_column_is_answered_with_the_nearest():
    rows = make_rows(clicks=pa.array([1]), price=pa.array([1.0]))
    with pytest.raises(DataError, match=r"part-0\.parquet.* 'click'. Did you mean 'clicks"):
        sparse_column(rows, "click")
    with pytest.raises(DataError, match="Use one of these columns: 'clicks', 'price"):
        dense_features(rows, ("zzz",))


def test_dense_features_of_any_number():
    rows = make_rows(
        a=pa.array([1, 2], pa.int64()),
        b=pa.array([0.5, 0.25], pa.float64()),
        c=pa.array([True, False]),
    )
    features = dense_features(rows, ("c", "a", "b"))
    assert features.tolist() == [[1.0, 1.0, 0.5], [0.0, 2.0, 0.25]]
    assert dense_features(rows, ()).shape == (2, 0)


@pytest.mark.parametrize("column", [[0, 1, 2], [0.0, 1.0, 0.5], [0, 1, -1], [0, 1, 1 + 1e-12]])
def test_labels_are_zero_or_one(column):
    assert labels(make_rows(y=pa.array(column[:2])), "y").tolist() == [0.0, 1.0]
    with pytest.raises(DataError, match=rf"row 102.*'y'.*label is {column[2]}"):
        labels(make_rows(y=pa.array(column)), "y")
