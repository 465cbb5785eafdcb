"""Values of every type, against what Python itself makes of them."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recd_plugin_tables.kinds import ColumnOptions, normal
from recd_plugin_tables.values import (
    Cells,
    id_lists,
    ids_of,
    labels_of,
    microseconds,
    number_rows,
    numbers_of,
)
from recd_plugins.runtime.errors import DataError

NOON = dt.datetime(2024, 5, 1, 12, 30, tzinfo=dt.UTC)  # a Wednesday
NAIVE = NOON.replace(tzinfo=None)


def cells(values: object) -> Cells:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return Cells(normal(array), lambda index: f"t: row {index}")


def use(role: object, **options: object) -> ColumnOptions:
    return ColumnOptions.model_validate({"as": role, **options})


def hashed(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


ID, A = uuid.UUID(int=7).bytes, hashed("a")
IDS: dict[str, Any] = {
    "int8": (pa.array([-3, None, 7], pa.int8()), [-3, None, 7]),
    "uint64": (pa.array([1, 2**63, 2**64 - 1], pa.uint64()), [1, -(2**63), -1]),
    "whole floats": (pa.array([3.0, math.nan, None, -(2.0**53) + 1]), [3, None, None, 1 - 2**53]),
    "bools": (pa.array([True, None, False]), [1, None, 0]),
    "decimals": (pa.array([Decimal("12"), Decimal("-3.00"), None]), [12, -3, None]),
    "text": (pa.array(["é", "", None]), [hashed("é"), hashed(""), None]),
    "text views": (pa.array(["a", "bc"], pa.string_view()), [hashed("a"), hashed("bc")]),
    "categories": (pa.array(["a", None, "a"]).dictionary_encode(), [A, None, A]),
    "numbered categories": (pa.array([5, None]).dictionary_encode(), [5, None]),
    "bytes": (pa.array([ID], pa.binary(16)), [hashed(ID)]),
    "dates": (pa.array([dt.date(1970, 1, 3), None]), [2, None]),
    "runs": (pa.RunEndEncodedArray.from_arrays([2, 3, 4], [7, None, 9]), [7, 7, None, 9]),
}


@pytest.mark.parametrize("what", IDS)
def test_ids_are_equal_where_values_are(what):
    values, expected = IDS[what]
    assert ids_of(cells(values), use("id")).to_pylist() == expected
    assert ids_of(cells(values.slice(1)), use("id")).to_pylist() == expected[1:]


def test_hashes_of_text_stay_what_they_are():
    """Other figures would make every model that was trained on text worthless."""
    hashes = [475_909_428_181_076_981, 7_689_094_955_924_901_065]
    assert ids_of(cells(["item-42", "u1"]), use("id")).to_pylist() == hashes


@pytest.mark.parametrize("values", [[NOON, None], pa.array([NAIVE, None], pa.timestamp("ms"))])
def test_parts_of_times(values):
    given = cells(values)
    for by, whole, part in (("hour", 12, 12.5), ("weekday", 2, 2 + 12.5 / 24)):
        assert ids_of(given, use("id", by=by)).to_pylist() == [whole, None]
        assert np.allclose(numbers_of(given, use("number", by=by)), [part, np.nan], equal_nan=True)
    days = NOON.timestamp() / 86_400
    assert ids_of(given, use("id", by="day")).to_pylist() == [int(days), None]
    assert numbers_of(given, use("number"))[0] == pytest.approx(days)
    stored = cells([NOON.timestamp() * 1000])
    assert ids_of(stored, use("id", by="hour", unit="ms")).to_pylist() == [12]
    for kind in (pa.string(), pa.dictionary(pa.int8(), pa.string())):
        text = cells(pa.array([str(NAIVE), None], kind))
        assert ids_of(text, use("id", by="hour")).to_pylist() == [12, None]


def test_times_of_every_type_are_microseconds():
    micro = int(NOON.timestamp() * 10**6)
    seconds = int(NOON.timestamp())
    cases: Any = (
        ([NOON], None),
        (pa.array([NAIVE], pa.timestamp("ns")), None),
        (["2024-05-01 12:30:00"], None),
        (["2024-05-01T12:30"], None),
        (["2024-05-01T12:30:00Z"], None),
        (["2024-05-01T14:30:00+02:00"], None),
        ([seconds], "s"),
        ([float(seconds)], None),
        (pa.array([seconds * 1000], pa.uint64()), "ms"),
        ([seconds * 10**9], "ns"),
        ([20240501123000], "YYYYMMDDHHMMSS"),
        ([202405011230.0], "YYYYMMDDHHMM"),
    )
    for given, unit in cases:
        assert microseconds(cells(given), unit).to_pylist() == [micro], given
        encoded = cells(cells(given).values.dictionary_encode())
        assert microseconds(encoded, unit).to_pylist() == [micro], given
    dates = cells([dt.date(1970, 1, 2), None])
    assert microseconds(dates, None).to_pylist() == [86_400 * 10**6, None]
    with pytest.raises(DataError, match=r"row 1: .*'noon'. The text is not a time"):
        microseconds(cells(["2024-05-01", "noon"]), None)
    with pytest.raises(DataError, match=r"row 1: .*00:00Z'. The text is not a time"):
        microseconds(cells(["2024-05-01", "2024-05-01T00:00:00Z"]), None)
    with pytest.raises(DataError, match=r"too large for unit s. Set option 'unit' .* 'ms'"):
        microseconds(cells([seconds * 1000]), None)


@pytest.mark.parametrize(
    ("given", "unit", "text"),
    [
        (14102123, "YYMMDDHH", "2014-10-21 23:00"),
        (20240501, "YYYYMMDD", "2024-05-01 00:00"),
        (2024050107, "YYYYMMDDHH", "2024-05-01 07:00"),
    ],
)
def test_digits_of_a_date_are_a_time(given, unit, text):
    expected = microseconds(cells([text]), None).to_pylist()
    assert microseconds(cells([float(given), np.nan]), unit).to_pylist() == [*expected, None]
    with pytest.raises(DataError, match=f"row 1: the value is .*not a date in the form {unit}"):
        microseconds(cells([given, given * 10]), unit)


def test_numbers():
    cases: Any = (
        ([True, None], [1, np.nan]),
        ([Decimal("1.25"), None], [1.25, np.nan]),
        (pa.array([2**64 - 1], pa.uint64()), [float(2**64)]),
        ([dt.timedelta(milliseconds=1500)], [1.5]),
        ([dt.time(1, 0, 1)], [3601]),
        (pa.array([1.5, None]).dictionary_encode(), [1.5, np.nan]),
        (pa.array([1, 2], pa.float16()), [1, 2]),
    )
    for given, expected in cases:
        assert np.array_equal(numbers_of(cells(given), use("number")), expected, equal_nan=True)


FLOATS = (pa.list_(pa.float32()), pa.list_(pa.float32(), 2), pa.list_view(pa.float64()))


@pytest.mark.parametrize("kind", [*FLOATS, pa.large_list(pa.int16())])
def test_lists_of_numbers(kind):
    given = pa.array([[9, 9], [1, 2], None, [3, None]], kind).slice(1)
    expected: Any = [[1, 2], [np.nan, np.nan], [3, np.nan]]
    assert np.array_equal(number_rows(cells(given), use("numbers"), 2), expected, equal_nan=True)
    with pytest.raises(DataError, match=r"row 0: .* has 2 numbers, but the first list .* has 3"):
        number_rows(cells(given), use("numbers"), 3)


LISTS = pa.array([["z"], ["a", None, "b"], None, [], [None]]).slice(1)


@pytest.mark.parametrize(
    ("missing", "expected", "dropped"),
    [
        (None, [["a", "b"], [], [], []], []),
        ("empty", [["a", "b"], [], [], []], []),
        ("none", [["a", "none", "b"], ["none"], [], ["none"]], []),
        ("drop", [["a", "b"], [], [], []], [0, 1, 3]),
    ],
)
@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string()),
                                  pa.list_(pa.dictionary(pa.int8(), pa.string()))])  # fmt: skip
def test_lists_of_ids_and_their_gaps(missing, expected, dropped, kind):
    options = {} if missing is None else {"missing": missing}
    given = pa.array(LISTS.to_pylist(), kind)
    lists, drops, num_nulls = id_lists(cells(given), use("ids", **options))
    assert lists.to_pylist() == [[hashed(text) for text in row] for row in expected]
    assert np.flatnonzero(drops).tolist() == dropped
    assert num_nulls == 3


def test_gaps_may_be_errors_and_texts_lists():
    with pytest.raises(DataError, match=r"row 1: the value is None. The id is missing"):
        id_lists(cells(LISTS), use("ids", missing="error"))
    lists, _, num_nulls = id_lists(cells(["a|b", "", None, "c"]), use("ids", separator="|"))
    assert lists.to_pylist() == [[hashed("a"), hashed("b")], [], [], [hashed("c")]]
    assert num_nulls == 1
    lists, _, _ = id_lists(cells([7, None]), use("id", missing=0))
    assert lists.to_pylist() == [[7], [0]]
    gaps = cells([None, [7, None], [], [8], None])
    lists, dropped, num_nulls = id_lists(gaps, use("ids", missing=9))
    assert lists.to_pylist() == [[9], [7, 9], [], [8], [9]]
    assert (dropped.any(), num_nulls) == (False, 3)


@pytest.mark.parametrize(
    ("separator", "text"),
    [
        (",", "a, b"),
        (",", " a ,b,, "),
        (",", "[a, b]"),
        (" ", "{a  b}"),
        ("|", "a | b"),
        ("::", "a:: b"),
        ("\t", "a\tb"),
        (r"\t", "a\tb"),
        (r"\x01", "a\x01b"),
        (" - ", "a - b"),
    ],
)
def test_spaces_and_brackets_are_no_part_of_ids(separator, text):
    lists, _, _ = id_lists(cells([text]), use("ids", separator=separator))
    assert lists.to_pylist() == [[hashed("a"), hashed("b")]]


def test_quotes_in_brackets_are_no_part_of_ids():
    texts = ['["a", "b"]', "['a','b']", '"a",b', "[]", '["a"]x']
    lists, _, _ = id_lists(cells(texts), use("ids", separator=","))
    both = [hashed("a"), hashed("b")]
    assert lists.to_pylist() == [both, both, [hashed('"a"'), hashed("b")], [], [hashed('["a"]x')]]


def test_whole_numbers_in_a_text_are_those_of_numbers():
    whole = use("ids", separator="|", integers=True)
    lists, _, _ = id_lists(cells(["7|-9", "", None, f"007|{2**63 - 1}"]), whole)
    assert lists.to_pylist() == [[7, -9], [], [], [7, 2**63 - 1]]
    for wrong in ("a", "1.5", "1 2", "0x1F", str(2**63), "12345678901234567890"):
        message = rf"row 1: the value is '{wrong}'\. .* not a 64-bit integer"
        with pytest.raises(DataError, match=message):
            id_lists(cells(["7", f"8|{wrong}"]), whole)


def test_labels():
    assert labels_of(cells([True, False]), use("label")).tolist() == [1, 0]
    assert labels_of(cells([4, 2.5, 5]), use("label", positive_from=4)).tolist() == [1, 0, 1]
    assert labels_of(cells(["b", "c"]), use("label", positive=["b", "x"])).tolist() == [1, 0]
    assert labels_of(cells([1, 2, 3]), use("label", positive=[2, 3])).tolist() == [0, 1, 1]
    floats = [at / 100 for at in range(1000)]
    cents = pa.array([Decimal(at).scaleb(-2) for at in range(1000)], pa.decimal32(9, 2))
    for given in (pa.array(floats, pa.float32()), pa.array(floats), cents):
        values = cells(given)
        for at in (7, 70, 110, 430):
            above = labels_of(values, use("label", positive_from=at / 100))
            assert above.tolist() == [each >= at for each in range(1000)], (given.type, at)
            same = labels_of(values, use("label", positive=[at / 100]))
            assert same.tolist() == [each == at for each in range(1000)], (given.type, at)
    gap = labels_of(cells([None, "c"]), use("label", positive=["c"]))
    assert np.array_equal(gap, [np.nan, 1], equal_nan=True)
    with pytest.raises(DataError, match=r"row 2: the value is 2. .* positive_from: .* positive:"):
        labels_of(cells([0, 1, 2]), use("label"))
