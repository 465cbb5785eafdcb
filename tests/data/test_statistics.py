from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=50)
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
