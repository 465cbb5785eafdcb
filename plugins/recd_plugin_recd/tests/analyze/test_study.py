"""Accumulators of ``recd analyze``: sessions, and a sample of whole ones in bounded memory."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recd_plugin_recd.analyze import study
from recd_plugin_recd.analyze.study import SessionCounts, SessionSample

RANDOM = np.random.default_rng(0)


@given(
    st.lists(st.sampled_from([0, 5, 7, 2**64 - 1]), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=3),
    st.booleans(),
)
def test_counts_sessions_and_those_that_are_torn(sessions, cuts, merged_often):
    counts = SessionCounts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_MAX_RUNS", 0 if merged_often else 100)
        for part in np.split(np.asarray(sessions, np.uint64), sorted(cuts)):
            counts.add(part)
        counts.end_partition()
    found = counts.result()
    rows = {session: sessions.count(session) for session in sessions}
    runs = [row for row, each in enumerate(sessions) if not row or each != sessions[row - 1]]
    torn = {sessions[row] for row in runs if sessions[row] in sessions[:row]}
    assert found.count == len(rows)
    assert found.samples_per_session == pytest.approx(len(sessions) / len(rows))
    assert found.longest == max(rows.values())
    assert found.torn == pytest.approx(len(torn) / len(rows))


def table(rows: int, sessions: int) -> tuple[np.ndarray, pa.RecordBatch]:
    session = RANDOM.integers(0, sessions, rows)
    hashes = RANDOM.integers(0, 1 << 64, sessions, np.uint64)[session]
    times = RANDOM.integers(0, 100, rows)
    return hashes, pa.record_batch({"session": session, "ts": times, "row": np.arange(rows)})


@pytest.mark.parametrize(("size", "max_bytes"), [(7, 10**9), (5000, 10**9), (100, 40_000)])
def test_sessions_are_held_whole_by_session_and_time(size, max_bytes):
    hashes, batch = table(5000, 300)
    held = SessionSample(max_bytes)
    for start in range(0, 5000, size):
        held.add(batch.slice(start, size), hashes[start : start + size])
    found, rows = held.by_session("ts")
    places = rows["row"].to_numpy()
    assert (found == hashes[places]).all()
    order = list(zip(found, rows["ts"].to_numpy(), places, strict=True))
    assert order == sorted(order), "by session, time and place"
    assert set(places) == set(np.flatnonzero(np.isin(hashes, found))), "whole sessions"
    assert len(places) == 5000 if max_bytes > 10**6 else 300 < len(places) <= max_bytes / 24
