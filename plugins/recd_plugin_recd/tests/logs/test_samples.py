"""Rows as bytes."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugin_recd.logs.samples import SampleCodec
from recd_plugins.errors import DataError

TYPES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint8(): st.integers(0, 255),
    pa.float64(): st.floats(allow_nan=False),
    pa.float16(): st.sampled_from([np.float16(0.5), np.float16(-3)]),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(dt.date(1900, 1, 1)),
    pa.timestamp("us", "UTC"): st.datetimes(dt.datetime(1990, 1, 1), timezones=st.just(dt.UTC)),
    pa.string(): st.text(max_size=5),
    pa.large_string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.list_(pa.int64()): st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    pa.large_list(pa.int16()): st.lists(st.integers(-9, 9), max_size=4),
    pa.list_(pa.float32()): st.lists(st.floats(width=32, allow_nan=False), max_size=3),
}


@st.composite
def batches(draw):
    kinds = draw(st.lists(st.sampled_from(list(TYPES)), min_size=1, max_size=10))
    count = draw(st.integers(0, 6))
    columns = [
        pa.array(draw(st.lists(st.none() | TYPES[kind], min_size=count, max_size=count)), type=kind)
        for kind in kinds
    ]
    return pa.record_batch(columns, names=[f"c{i}" for i in range(len(kinds))])


@settings(max_examples=150, deadline=None)
@given(batches(), st.data())
def test_rows_come_back(batch, data):
    start = data.draw(st.integers(0, batch.num_rows))
    batch = batch.slice(start)
    codec = SampleCodec(batch.schema)
    encoded, offsets = codec.encode(batch)
    assert np.diff(offsets).tolist() == codec.row_sizes(batch).tolist()
    decoded = codec.decode(encoded, offsets)
    decoded.validate(full=True)
    assert decoded.equals(batch)


def test_the_bytes_are_those_of_the_documentation():
    batch = pa.record_batch(
        [
            pa.array([7, None], pa.int16()),
            pa.array([[1], [2, 3]], pa.list_(pa.int32())),
            pa.array(["é", None]),
        ],
        names=["number", "list", "text"],
    )
    encoded, offsets = SampleCodec(batch.schema).encode(batch)
    first = bytes.fromhex("000700010000000200000001000000c3a9")
    second = bytes.fromhex("05000002000000000000000200000003000000")
    assert encoded.tobytes() == first + second
    assert offsets.tolist() == [0, len(first), len(first) + len(second)]


def test_what_lies_under_a_null_is_not_stored():
    hidden = pa.Array.from_buffers(
        pa.list_(pa.int64()),
        2,
        [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([0, 2, 3], np.int32))],
        children=[pa.array([8, 9, 10])],
    )
    batch = pa.record_batch([hidden], names=["list"])
    codec = SampleCodec(batch.schema)
    decoded = codec.decode(*codec.encode(batch))
    assert decoded.to_pydict() == {"list": [None, [10]]}
    assert len(decoded.column(0).values) == 1


@pytest.mark.parametrize(
    "kind", [pa.struct([("a", pa.int64())]), pa.list_(pa.string()), pa.decimal128(9, 2)], ids=str
)
def test_other_types_are_named(kind):
    with pytest.raises(DataError, match=r"column 'deep' of type .* has no row-wise form"):
        SampleCodec(pa.schema([("deep", kind)]))


def test_a_null_in_a_list_is_refused():
    batch = pa.record_batch([pa.array([[None], [1], [], [2, None], [None]])], names=["list"])
    with pytest.raises(DataError, match=r"row 2 \(from 0\): column 'list': a null inside a list"):
        SampleCodec(batch.schema).encode(batch.slice(1))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 3))
def test_other_bytes_are_an_error_or_rows(data, count):
    codec = SampleCodec(pa.schema([("a", pa.int32()), ("b", pa.list_(pa.int64()))]))
    offsets = np.linspace(0, len(data), count + 1).astype(np.int64)
    with suppress(DataError):
        codec.decode(np.frombuffer(data, np.uint8), offsets).validate(full=True)
