"""Statistics of tables: the formula, the counts, files that add up, the footer."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recd_plugins.data.list_dict import list_dict_field, to_list_dict
from recd_plugins.data.parquet import FOOTER_KEY, read_footers
from recd_plugins.data.statistics import StatisticsAccumulator
from recd_plugins.interfaces import SessionKeys
from recd_plugins.interfaces.data_profile import (
    MAX_SHIFT,
    FeatureStatistics,
    TableStatistics,
    dedupe_factor,
)

KEYS = SessionKeys("session_id", "ts")


def batch(sessions, **lists) -> pa.RecordBatch:
    columns = {name: pa.array(column, pa.list_(pa.int64())) for name, column in lists.items()}
    return pa.record_batch({"session_id": pa.array(sessions), **columns})


def statistics(*batches: pa.RecordBatch) -> TableStatistics:
    accumulator = StatisticsAccumulator(batches[0].schema, KEYS)
    for each in batches:
        accumulator.add(each)
    return accumulator.result()


def test_the_formula_has_the_value_of_the_paper():
    assert dedupe_factor(samples_per_session=3, stays=0.5) == 1.5
    assert dedupe_factor(1, 0.9) == 1
    assert dedupe_factor(16.5, 1) == pytest.approx(16.5)


def test_counts_of_a_small_table():
    lists = [
        [1, 2, 3],  # a session begins
        [1, 2, 3],  # unchanged
        [2, 3, 4],  # moved on by one
        [9, 4, 9],  # shares 4, by no shift
        [],
        [],  # unchanged
        [1],  # a session begins
        [1, 5],  # moved on by none
    ]
    found = statistics(batch([7] * 6 + [8] * 2, x=lists))
    assert found.features["x"] == FeatureStatistics(
        rows=8, sessions=2, ids=15, unchanged_rows=2, unchanged_ids=3, shifted_ids=3 + 2 + 1,
        shared_ids=3 + 2 + 1 + 1,
    )  # fmt: skip
    assert (found.rows, found.sessions, found.samples_per_session) == (8, 2, 4)
    x = found.features["x"]
    assert (x.stays, x.length) == (2 / 6, 15 / 8)
    assert (x.exact_duplication, x.partial_duplication) == (3 / 15, 7 / 15)
    assert (x.dedupe_factor, x.partial_dedupe_factor) == (15 / 12, 15 / 9)


def by_hand(sessions, lists) -> FeatureStatistics:
    counts = Counter(rows=len(lists), sessions=len(lists), ids=sum(map(len, lists)))
    for row in range(1, len(lists)):
        if sessions[row] != sessions[row - 1]:
            continue
        counts["sessions"] -= 1
        old, new = lists[row - 1], lists[row]
        counts["unchanged_rows"] += old == new
        counts["unchanged_ids"] += len(new) if old == new else 0
        shared = [
            len(old) - k
            for k in range(min(MAX_SHIFT + 1, len(old)))
            if old[k:] == new[: len(old) - k]
        ]
        counts["shifted_ids"] += shared[0] if shared else 0
        counts["shared_ids"] += (Counter(old) & Counter(new)).total()
    return FeatureStatistics(**counts)


ids = st.lists(st.integers(0, 3) | st.just(-(2**62)), max_size=12)


@given(st.lists(st.tuples(st.integers(0, 2), ids, ids), max_size=12), st.data())
def test_counts_are_those_by_hand_whatever_the_batches(rows, data):
    sessions, lists, others = [[row[i] for row in rows] for i in range(3)]
    if data.draw(st.booleans()):
        lists = [lists[row // 2] for row in range(len(lists))]  # rows that repeat
    whole = batch(pa.array(sessions, pa.int64()), x=lists, y=others)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    parts = [
        whole.slice(start, stop - start)
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)
    ]
    found = statistics(*parts)
    assert found.features == {"x": by_hand(sessions, lists), "y": by_hand(sessions, others)}


def test_tells_which_rows_changed_across_batches():
    accumulator = StatisticsAccumulator(batch([1], x=[[1]]).schema, KEYS)
    changed = [
        accumulator.add(batch([1, 1], x=[[1], [2]])).tolist(),
        accumulator.add(batch([1, 1], x=[[2], [3]])).tolist(),
    ]
    assert changed == [[[False, True]], [[False, True]]]


def test_list_dict_counts_alike():
    lists = pa.array([[1, 2], [1, 2], [2, 3], []], pa.list_(pa.int64()))
    expected = statistics(batch([1] * 4, x=lists))
    fields = [pa.field("session_id", pa.int64()), list_dict_field("x")]
    columns = [pa.array([1] * 4), to_list_dict(lists)]
    assert statistics(pa.record_batch(columns, schema=pa.schema(fields))) == expected


@pytest.mark.parametrize(
    "sessions",
    [
        pa.array(["a", "a", "b"]),
        pa.array(["a", "a", "b"]).dictionary_encode(),
        pa.array([b"a", b"a", b"b"]),
        pa.array([1, 1, 2], pa.uint64()),
    ],
)
def test_sessions_of_any_type(sessions):
    assert statistics(batch(sessions, x=[[1], [1], [1]])).sessions == 2


def write(path, table: pa.RecordBatch, metadata: bytes | None) -> None:
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_batch(table)
        if metadata is not None:
            writer.add_key_value_metadata({FOOTER_KEY: metadata})


def test_a_footer_carries_statistics_and_files_merge(tmp_path):
    parts = [batch([1, 1], x=[[1], [1]]), batch([2], x=[[2]])]
    for number, part in enumerate(parts):
        write(tmp_path / f"{number}", part, json.dumps(statistics(part).to_json()).encode())
    paths = [tmp_path / "0", tmp_path / "1"]
    assert read_footers([paths[0]]) == statistics(parts[0])
    assert read_footers(paths) == statistics(*parts)
    write(paths[1], parts[1], None)
    assert read_footers([paths[1]]) is None
    assert read_footers(paths) is None
